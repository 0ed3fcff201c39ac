"""A pod as the sandbox's vessel: what is known of it from outside, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from openforgerl.errors import StageError
from openforgerl.sandboxes.channel import Channel
from openforgerl.sandboxes.kubernetes.classification import CONTAINER
from openforgerl.sandboxes.kubernetes.cluster import Object
from openforgerl.sandboxes.kubernetes.gateway import Stream
from openforgerl.sandboxes.kubernetes.lifecycle import PodLife
from openforgerl.sandboxes.kubernetes.manifests import image_of
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.types import JsonValue, Origin, SandboxRef, SandboxSpec, Stage

log = logging.getLogger(__name__)

BACKEND = "kubernetes"
_NEWS_SECONDS = 5.0
"""How long the API server's word on a pod is waited for after its init fell silent: it lags by a second or two."""


class PodVessel:
    """`sandbox.Vessel` of one pod. The host's own look into it is the API server's and no other."""

    def __init__(self, ref: SandboxRef, life: PodLife, channel: Channel, remove_timeout: float) -> None:
        self._ref = ref
        self._life = life
        self._channel = channel
        self._remove_timeout = remove_timeout
        self._tasks: set[asyncio.Task[None]] = set()
        life.on_stream = self._again
        self._spawn(self._sentinel())

    @property
    def ref(self) -> SandboxRef:
        return self._ref

    @property
    def gated(self) -> bool:
        return False

    def admit(self, pid: int) -> None:
        """The container's own group counts it."""
        del pid

    def oom_kills(self) -> int:
        return 0  # init counts, from inside

    def survivors(self) -> str:
        return ""

    async def obituary(self) -> StageError:
        """From what the watch said; with what the pod left, before it is deleted."""
        failure = await self._life.failed(_NEWS_SECONDS)
        evidence = await self._life.evidence()
        if failure is None:
            text = "the connection to the sandbox's init is lost, and the API server says that its pod is well"
            kind, origin, retryable = "connection_lost", Origin.INFRASTRUCTURE, True
        else:
            text, kind, origin, retryable = failure.message, failure.kind, failure.origin, failure.retryable
            evidence = {**evidence, **failure.evidence}
        return StageError(Stage.SANDBOX, kind, text, origin=origin, retryable=retryable, evidence=dict(evidence))

    async def destroy(self) -> None:
        """Delete the pod and see it gone. One that lingers is left to the reaper: its init is shut out already."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        if not await self._life.remove(self._remove_timeout):
            log.warning("pod %s still lingers; it is reaped when the run ends", self._life.name)

    async def _sentinel(self) -> None:
        """A pod that has ended brings its callers their answer at once, not after the patience of a connection."""
        await self._life.ended()
        await self._channel.close()

    def _again(self, stream: Stream) -> None:
        """Init has dialled again."""
        self._spawn(self._channel.rejoin(*stream)).add_done_callback(partial(self._rejoined, stream))

    def _rejoined(self, stream: Stream, task: asyncio.Task[None]) -> None:
        """The channel has the stream, or nobody: what is cancelled before its first step runs no `finally`."""
        if task.cancelled():
            stream[1].transport.abort()
        elif (error := task.exception()) is not None:
            log.warning("pod %s: what dialled again is not its init: %s", self._life.name, error or "another process")
            stream[1].transport.abort()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def described(
    life: PodLife, spec: SandboxSpec, options: KubernetesOptions, said: dict[str, Any], *, filtered: bool
) -> dict[str, JsonValue]:
    """The report. `said`: init's answer to `start`, read from the kernel inside.

    `filtered`: init puts our system-call filter on every program (on itself it has the container's own).
    """
    pod: Object = life.news.pod or {}
    statuses: list[Object] = pod.get("status", {}).get("containerStatuses") or []
    image = next((str(item.get("imageID") or "") for item in statuses if item["name"] == CONTAINER), "")
    status: dict[str, str] = said["status"]
    limits = spec.limits
    own = f"RLIMIT_NPROC {limits.processes} in an own user namespace"
    return {
        "backend": BACKEND,
        "pod": life.name,
        "node": str(pod.get("spec", {}).get("nodeName") or ""),
        "image": image_of(spec, options),
        "image_digest": image,
        "runtime_class": options.runtime_class,
        "namespaces": said["namespaces"],
        "uid": {"inside": int(status["Uid"].split()[0])},
        "capabilities": status["CapEff"],
        "no_new_privileges": status["NoNewPrivs"] == "1",
        "system_call_filter": filtered or status["Seccomp"] == "2",
        "limits": {
            "memory": f"pod {limits.memory_mb} MB, tmpfs included" if options.writable == "memory" else "pod",
            "processes": own if options.user_namespaces else "the kubelet's podPidsLimit",
            "disk": f"emptyDir {limits.disk_mb} MB each, {options.writable}",
            "open_files": f"RLIMIT_NOFILE {limits.open_files}",
            "cpu": f"limit {options.cpu_limit}" if options.cpu_limit else "none",
        },
        "timings": {name: round(seconds, 3) for name, seconds in life.seconds.items()},
    }
