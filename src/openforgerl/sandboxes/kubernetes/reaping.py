"""Reaping the runs of others: those whose Lease nobody renews, for `openforgerl reap --expired`."""

from __future__ import annotations

from collections.abc import Mapping

from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.runs import find_runs, reap_run
from openforgerl.sandboxes.options import SandboxOptions


async def reap_expired(options: SandboxOptions, environ: Mapping[str, str], now: float, only_list: bool) -> list[str]:
    """Reap every run of the namespace whose Lease is overdue at `now` (Unix seconds) or missing; one line a run."""
    chosen = options.kubernetes
    cluster = HttpCluster(find_access(chosen.kubeconfig, chosen.context, environ), chosen.namespace)
    lines: list[str] = []
    try:
        for run in await find_runs(cluster, now):
            if not run.expired:
                lines.append(f"{run.run_id}: {run.pods} pods, held by {run.holder}: left alone")
            elif only_list:
                lines.append(f"{run.run_id}: {run.pods} pods, owner dead")
            else:
                seconds = chosen.grace + options.kill_timeout
                count = await reap_run(cluster, run.run_id, grace=chosen.grace, seconds=seconds)
                lines.append(f"{run.run_id}: {count} pods destroyed")
    finally:
        await cluster.close()
    return lines or [f"no run has anything in namespace {cluster.namespace}"]
