"""The kubelet of all nodes: one life for each pod, and what exec and log ask of it."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.collecting import Spawn
from openforgerl.testing.fake_kubernetes.containers import Image, Runtime
from openforgerl.testing.fake_kubernetes.inprocess import CoroutineRuntime
from openforgerl.testing.fake_kubernetes.kinds import PODS, Resource
from openforgerl.testing.fake_kubernetes.networks import PodNetwork
from openforgerl.testing.fake_kubernetes.nodes import Nodes
from openforgerl.testing.fake_kubernetes.objects import Change, Stored
from openforgerl.testing.fake_kubernetes.podlife import Machine, PodLife
from openforgerl.testing.fake_kubernetes.processes import ProcessRuntime
from openforgerl.testing.fake_kubernetes.registry import Registry
from openforgerl.testing.fake_kubernetes.scenarios import Scenarios


def _relabelled(change: Change) -> bool:
    """Whether what the downward API shows has changed."""
    if change.before is None:
        return False
    before, now = change.before.body["metadata"], change.now.body["metadata"]
    return any(before.get(name) != now.get(name) for name in ("labels", "annotations"))


@dataclass(slots=True)
class Kubelet:
    """`images`: name pattern → what it stands for, the first that fits; other names are this machine's own system."""

    registry: Registry
    clock: Clock
    timings: Timings
    nodes: Nodes
    scenarios: Scenarios
    spawn: Spawn
    state: Path
    images: dict[str, Image]
    volume_images: Mapping[str, Path]
    rotate_at: int
    network: PodNetwork | None = None
    lives: dict[str, PodLife] = field(default_factory=dict[str, PodLife])
    """Pod uid → its life. A life outlasts its object while containers run on a lost node."""
    _processes: ProcessRuntime | None = None
    _coroutines: CoroutineRuntime = field(default_factory=CoroutineRuntime)
    _addresses: int = 1
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def noticed(self, resource: Resource, change: Change) -> None:
        """What the kubelet's own watch brings."""
        if resource is not PODS:
            return
        uid = change.now.uid
        if change.kind == "ADDED":
            self._begin(change.now)
        elif uid in self.lives and change.kind == "DELETED":
            self.lives[uid].removed.set()
        elif uid in self.lives and change.now.body["metadata"].get("deletionTimestamp"):
            self.lives[uid].deleted.set()
        elif uid in self.lives and _relabelled(change):
            self.spawn(self.lives[uid].refresh(change.now.body))

    def _begin(self, pod: Stored) -> None:
        images = [container["image"] for container in pod.body["spec"]["containers"]]
        planted = self.scenarios.plant(*pod.key, pod.uid, images)
        self._addresses += 1
        number = self._addresses
        address = f"127.{1 + number // 62500 % 250}.{number // 250 % 250}.{2 + number % 250}"
        if self.network is not None:
            address = self.network.address(number)
        machine = Machine(
            registry=self.registry,
            clock=self.clock,
            timings=self.timings,
            nodes=self.nodes,
            image=self.image,
            runtime=self.runtime,
            volume_images=self.volume_images,
            state=self.state,
            rotate_at=self.rotate_at,
            network=self.network,
        )
        life = self.lives[pod.uid] = PodLife(machine, pod, planted, address)
        self.spawn(self._live(life))

    async def _live(self, life: PodLife) -> None:
        try:
            await life.live()
        finally:
            del self.lives[life.uid]
            self._ended.set()
            self._ended = asyncio.Event()

    async def quiet(self) -> None:
        """Until no pod lives."""
        while self.lives:
            await self._ended.wait()

    def restore(self, node: str) -> None:
        """Start the kubelet of a lost node again: it reports what still runs there."""
        self.nodes.restore(node)
        for life in self.lives.values():
            if life.node == node:
                self.spawn(life.reappear())

    def image(self, name: str) -> Image:
        """What an image name stands for."""
        for pattern, image in self.images.items():
            if fnmatch.fnmatchcase(name, pattern):
                return image
        return Image()

    def runtime(self, image: Image) -> Runtime:
        """What runs containers of that image."""
        if image.program is not None:
            return self._coroutines
        if self._processes is None:
            self._processes = ProcessRuntime()
        return self._processes

    @property
    def containers(self) -> list[tuple[str, str, int]]:
        """(pod's name, pod's uid, pid or 0) of every container that runs, those on lost nodes too."""
        return [
            (life.key[1], life.uid, slot.container.pid)
            for life in self.lives.values()
            for slot in life.slots
            if slot.container is not None
        ]
