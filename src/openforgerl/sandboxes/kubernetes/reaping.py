"""Reaping the runs of others: those whose Lease nobody renews, for `openforgerl reap --expired`."""

from __future__ import annotations

from collections.abc import Mapping

from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.runs import find_runs, reap_run
from openforgerl.sandboxes.options import SandboxOptions


async def reap_expired(options: SandboxOptions, environ: Mapping[str, str], now: float, only_list: bool) -> list[str]:
    """Reap every run whose Lease is overdue at `now` (Unix seconds) or missing, in all namespaces of the options; one
    line a run and namespace."""
    chosen = options.kubernetes
    first = HttpCluster(find_access(chosen.kubeconfig, chosen.context, environ), chosen.namespace)
    clusters = [first, *map(first.beside, chosen.more_namespaces)]
    lines: list[str] = []
    try:
        for cluster in clusters:
            where = f" in namespace {cluster.namespace}" if len(clusters) > 1 else ""
            for run in await find_runs(cluster, now):
                if not run.expired:
                    lines.append(f"{run.run_id}: {run.pods} pods{where}, held by {run.holder}: left alone")
                elif only_list:
                    lines.append(f"{run.run_id}: {run.pods} pods{where}, owner dead")
                else:
                    seconds = chosen.grace + options.kill_timeout
                    count = await reap_run(cluster, run.run_id, grace=chosen.grace, seconds=seconds)
                    lines.append(f"{run.run_id}: {count} pods destroyed{where}")
    finally:
        await first.close()
    listed = ", ".join(cluster.namespace for cluster in clusters)
    return lines or [f"no run has anything in namespace{'s' if len(clusters) > 1 else ''} {listed}"]
