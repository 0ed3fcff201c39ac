"""How fast the cluster plays, and how long things take in a real one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as measured on Kubernetes 1.36 with one node; a cluster's clock scales them."""

    schedule: float = 0.05
    """Creation → PodScheduled, either way."""
    start: float = 0.6
    """Scheduled → containers running, image present."""
    phase: float = 1.2
    """By which a container's end is seen before the pod's phase."""
    pull: float = 1.0
    """A try to pull an image that is not there."""
    pull_back_off: float = 10.0
    """First pause between two such tries; it doubles up to 300 s."""
    deadline: float = 3.3
    """By which activeDeadlineSeconds comes late: 4 s were seen at 7.3 s."""
    evict: float = 8.7
    """Start → Evicted, for a pod that soon has too much on its disk."""
    lost_pods: float = 43.0
    """Kubelet dead → its pods Ready=False."""
    lost_node: float = 50.0
    """Kubelet dead → node NotReady, and tainted."""
    removal: float = 2.3
    """Last container dead → 404: grace 1 with a program that ignores TERM took 3.3 s."""
    collect: float = 1.6
    """Owner gone → its dependents are deleted."""
    refresh: float = 1.5
    """A pod's annotation changed → its downward volumes follow. Not measured: a kubelet promises a minute."""
    look: float = 10.0
    """Between two looks of the kubelet at the sizes of logs and volumes."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Two scales: `cluster` for what a cluster takes by itself, `promised` for seconds written in objects.

    Seconds in objects are activeDeadlineSeconds, grace periods, tolerationSeconds and ttlSecondsAfterFinished. With
    `cluster=0.01` a cluster is a hundred times faster than a real one and keeps its promises to the second.
    """

    cluster: float = 1.0
    promised: float = 1.0

    async def sleep(self, seconds: float) -> None:
        """Let so many of the cluster's seconds pass."""
        await asyncio.sleep(seconds * self.cluster)

    async def sleep_promised(self, seconds: float) -> None:
        """Let so many seconds pass that an object speaks of."""
        await asyncio.sleep(seconds * self.promised)

    @staticmethod
    def now() -> str:
        """RFC 3339, to the second, as metav1.Time."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @staticmethod
    def now_micro() -> str:
        """RFC 3339 with microseconds, as metav1.MicroTime."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
