"""What there is of runs in a namespace, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

import msgspec

from openforgerl.errors import StoreError
from openforgerl.sandboxes.kubernetes import classification, names
from openforgerl.sandboxes.kubernetes.classification import Lost
from openforgerl.sandboxes.kubernetes.cluster import (
    CONFIG_MAP,
    LEASE,
    POD,
    Cluster,
    Object,
    selector,
)
from openforgerl.sandboxes.kubernetes.holding import overdue

_LONGEST_PAUSE = 2.0
"""Between two looks at what a reaper waits for."""


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has objects in the namespace."""

    run_id: str
    pods: int
    holder: str = ""
    """Who renews its Lease; empty without one."""
    expired: bool = True
    """Its Lease is overdue, or missing: whoever owned it is dead."""


async def find_runs(cluster: Cluster, now: float) -> list[FoundRun]:
    """Every run of ours that has pods or a Lease, by name."""
    labels = selector({names.APP_LABEL: names.APP})
    pods, leases = await asyncio.gather(cluster.list(POD, labels=labels), cluster.list(LEASE, labels=labels))
    held = {run_of(lease): lease["spec"] for lease in leases.items}
    counts = dict.fromkeys(held, 0)
    for pod in pods.items:
        run = run_of(pod)
        counts[run] = counts.get(run, 0) + 1
    return [
        FoundRun(
            run_id=run,
            pods=count,
            holder=str(held.get(run, {}).get("holderIdentity") or ""),
            expired=run not in held or overdue(held[run], now),
        )
        for run, count in sorted(counts.items())
        if run
    ]


async def reap_run(cluster: Cluster, run_id: str, *, grace: int, seconds: float) -> int:
    """Delete a run's pods, ConfigMap and Lease, whoever made them, and see the pods gone; how many there were.

    Pods of nodes that are out of reach are removed by force. Raises StoreError when some are left after `seconds`.
    """
    labels = selector(names.run_labels(run_id))
    found = (await cluster.list(POD, labels=labels)).items
    if found:
        await cluster.delete_all(POD, labels=labels, grace=grace)
    for kind in (LEASE, CONFIG_MAP):
        await cluster.delete(kind, names.run_object(run_id), uid="")
    await _see_gone(cluster, run_id, {pod["metadata"]["uid"] for pod in found}, seconds)
    return len(found)


async def remove_pods(cluster: Cluster, run_id: str, pods: Sequence[Object], *, grace: int, seconds: float) -> None:
    """Delete these pods of a run, and see them gone as `reap_run` does."""
    for pod in pods:
        await cluster.delete(POD, pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace=grace)
    await _see_gone(cluster, run_id, {pod["metadata"]["uid"] for pod in pods}, seconds)


async def _see_gone(cluster: Cluster, run_id: str, uids: Collection[str], seconds: float) -> None:
    labels = selector(names.run_labels(run_id))
    until, pause = time.monotonic() + seconds, 0.1
    while uids:
        left = [pod for pod in (await cluster.list(POD, labels=labels)).items if pod["metadata"]["uid"] in uids]
        if not left:
            return
        if time.monotonic() > until:
            listed = ", ".join(str(pod["metadata"]["name"]) for pod in left[:5])
            raise StoreError(f"{len(left)} pods of run {run_id} are still there after {seconds:.0f} s: {listed}")
        await _force_lost(cluster, left)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _force_lost(cluster: Cluster, pods: Sequence[Object]) -> None:
    for pod in pods:
        if isinstance(classification.read(pod), Lost):
            await cluster.delete(POD, pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace=0)


def run_of(item: Object) -> str:
    """The run id that an object's annotation names; empty for none."""
    notes: Object = item["metadata"].get("annotations") or {}
    return str(notes.get(names.RUN_NOTE) or "")
