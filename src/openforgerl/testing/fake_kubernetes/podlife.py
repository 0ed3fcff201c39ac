"""The life of one pod, from its creation to its last container's death."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.containers import (
    Container,
    Ended,
    Image,
    Launch,
    Runtime,
    StartRefused,
)
from openforgerl.testing.fake_kubernetes.kinds import PODS, Object
from openforgerl.testing.fake_kubernetes.launching import Site, last_words, launch_of
from openforgerl.testing.fake_kubernetes.networks import PodNetwork
from openforgerl.testing.fake_kubernetes.nodes import Node, Nodes, NodeSpec, complaint
from openforgerl.testing.fake_kubernetes.objects import Stored
from openforgerl.testing.fake_kubernetes.podstatus import Phase, PodStatus, Slot
from openforgerl.testing.fake_kubernetes.registry import Registry
from openforgerl.testing.fake_kubernetes.scenarios import Planted, Scenario
from openforgerl.testing.fake_kubernetes.volumes import ConfigMissing, MountFailed, Volumes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a pod's life needs of its cluster."""

    registry: Registry
    clock: Clock
    timings: Timings
    nodes: Nodes
    image: Callable[[str], Image]
    runtime: Callable[[Image], Runtime]
    volume_images: Mapping[str, Path]
    state: Path
    rotate_at: int
    network: PodNetwork | None
    """None: all pods live in this machine's."""


class PodLife:
    """`live` plays it. `deleted` and `removed` are set by who watches the object."""

    def __init__(self, machine: Machine, pod: Stored, planted: Planted | None, address: str) -> None:
        self._machine = machine
        self._clock = machine.clock
        self._timings = machine.timings
        self._planted = planted
        self._scenario = planted.scenario if planted is not None else Scenario(name="")
        self.pod = pod.body
        self._spec: Object = pod.body["spec"]
        self.key = pod.key
        self.uid = pod.uid
        self.deleted = asyncio.Event()
        self.removed = asyncio.Event()
        self._node: Node | None = None
        self._status = PodStatus(pod.body, address)
        self._folder = machine.state / self.uid
        self._volumes = Volumes(machine.registry.objects, pod.body, self._folder / "volumes", machine.volume_images)
        self._forced: Ended | None = None
        """How the containers' end is to be told, whatever it was."""

    @property
    def slots(self) -> list[Slot]:
        """Init containers, then containers."""
        return self._status.slots

    @property
    def lost(self) -> bool:
        """Whether nobody hears of this pod's node."""
        return self._node is not None and self._node.lost

    @property
    def node(self) -> str:
        """Name of its node; empty while it has none."""
        return self._node.spec.name if self._node is not None else ""

    async def reappear(self) -> None:
        """Tell again what there is: meanwhile the node controller has written what it thought."""
        await self._report()

    async def refresh(self, pod: Object) -> None:
        """Its labels or annotations have changed: the files of the downward API follow, after the kubelet's look."""
        await self._clock.sleep(self._timings.refresh)
        await asyncio.to_thread(self._volumes.refresh, pod)

    async def live(self) -> None:
        """From creation to the end of containers and object."""
        flow = asyncio.create_task(self._flow())
        asked = asyncio.create_task(_first(self.deleted.wait(), self.removed.wait()))
        try:
            await asyncio.wait({flow, asked}, return_when=asyncio.FIRST_COMPLETED)
            if flow.done() and flow.exception() is None:
                await asked
        finally:
            asked.cancel()
            flow.cancel()
            await asyncio.wait({flow, asked})
            broken = None if flow.cancelled() else flow.exception()
            try:
                if self.deleted.is_set() or self.removed.is_set():
                    await self._stop()
            finally:
                await self._kill()
                if self._machine.network is not None:
                    await self._machine.network.detach(self.uid)
                self._machine.nodes.release(self.uid)
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            if broken is not None:
                raise broken

    async def _online(self) -> None:
        """The kubelet of a lost node says nothing until it is back."""
        while self._node is not None and self._node.lost:
            await self._node.back.wait()

    async def _report(self) -> None:
        await self._online()
        self._machine.registry.set_status(PODS, self.key, self.uid, self._status.body())

    def _event(self, reason: str, message: str, *, warning: bool = False, source: str = "kubelet") -> None:
        stored = self._machine.registry.objects.find(PODS, self.key)
        if stored is not None and stored.uid == self.uid:
            self._machine.registry.record(stored, reason, message, warning=warning, source=source)

    async def _flow(self) -> None:
        await self._schedule()
        await self._mount()
        status = self._status
        for slot in status.inits:
            await self._begin(slot)
            await self._report()
            if slot.container is not None:
                self._end(slot, await slot.container.wait())
            if slot.exit_code != 0:
                await self._report()
                await self._clock.sleep(self._timings.phase)
                await self._finish("Failed")
                return
        status.initialized = True
        for slot in status.mains:
            await self._begin(slot)
        status.phase = "Running"
        await self._report()
        await self._run()

    # -- scheduling -------------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        await self._clock.sleep(self._timings.schedule)
        if self._scenario.strike == "lose-node":
            self._machine.nodes.add(NodeSpec(name=f"doomed-{self.uid[:8]}", taken_by=self.uid))
        complained = ""
        while self._node is None:
            room = self._machine.nodes.room
            if self._scenario.unschedulable:
                choice: Node | str = complaint(1, ["Insufficient cpu"])
                self._strike()
            else:
                choice = self._machine.nodes.choose(self.pod)
            if isinstance(choice, Node):
                self._node = choice
            else:
                if choice != complained:
                    complained = choice
                    self._status.unschedulable = choice
                    await self._report()
                    self._event("FailedScheduling", choice, warning=True, source="default-scheduler")
                await room.wait()
        self._status.unschedulable = ""
        self._status.scheduled = True
        name = self._node.spec.name
        if self._planted is not None:
            self._planted.node = name
        self._machine.registry.bind(self.key, self.uid, name, self._status.body())
        self.pod = {**self.pod, "spec": {**self._spec, "nodeName": name}}
        self._event("Scheduled", f"Successfully assigned {'/'.join(self.key)} to {name}", source="default-scheduler")

    async def _mount(self) -> None:
        self._status.accepted = self._clock.now()
        self.pod = {**self.pod, "status": self._status.body()}
        await self._report()
        complained = False
        while True:
            try:
                await asyncio.to_thread(self._volumes.make)
                break
            except MountFailed as error:
                if not complained:
                    self._event("FailedMount", str(error), warning=True)
                complained = True
                await self._clock.sleep(2.0)
        if (network := self._machine.network) is not None:
            here = all(self._machine.image(slot.spec["image"]).program is not None for slot in self.slots)
            await network.attach(self.uid, self.pod, self._status.address, here=here)
        await self._clock.sleep(self._timings.start + self._scenario.pull_seconds)

    # -- starting ---------------------------------------------------------------------------------------------------

    async def _begin(self, slot: Slot) -> None:
        """Pull, configure and start one container; a container that cannot start has ended with 128."""
        spec = slot.spec
        image = self._machine.image(spec["image"])
        await self._pull(slot, image)
        launch = await self._configured(slot, image)
        slot.log = launch.log
        refusal = self._scenario.start_error
        if not refusal:
            try:
                slot.container = await _whole(self._machine.runtime(image).start(launch))
            except StartRefused as error:
                refusal = str(error)
        if refusal:
            self._strike()
            launch.log.end()
            why = (
                "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            )
            why += f"failed: unable to start container process: {refusal}"
            slot.terminated(128, "StartError", why, started="1970-01-01T00:00:00Z")
            self._event("Failed", f"Error: {why}", warning=True)
            return
        slot.running()
        self._event("Started", f"Container started: {slot.name}")

    async def _pull(self, slot: Slot, image: Image) -> None:
        name, policy = slot.spec["image"], slot.spec["imagePullPolicy"]
        if name.rpartition("@")[0].lower() != name.rpartition("@")[0] or any(letter.isspace() for letter in name):
            slot.waiting("InvalidImageName", f'Failed to apply default image tag "{name}": invalid reference format')
            await self._report()
            await asyncio.Event().wait()
        if self._scenario.pull == "never" or (image.missing and policy == "Never"):
            self._strike()
            why = f'Container image "{name}" is not present with pull policy of Never'
            slot.waiting("ErrImageNeverPull", why)
            await self._report()
            self._event("ErrImageNeverPull", why, warning=True)
            await asyncio.Event().wait()
        if self._scenario.pull == "missing" or image.missing:
            await self._pull_in_vain(slot, name)
        if image.pull_seconds:
            self._event("Pulling", f'Pulling image "{name}"')
            await self._clock.sleep(image.pull_seconds)
            self._event("Pulled", f'Successfully pulled image "{name}"')

    async def _pull_in_vain(self, slot: Slot, name: str) -> None:
        """ErrImagePull and ImagePullBackOff in turn, for ever."""
        self._strike()
        pause = self._timings.pull_back_off
        why = f'failed to pull and unpack image "{name}": failed to resolve reference "{name}": {name}: not found'
        while True:
            self._event("Pulling", f'Pulling image "{name}"')
            await self._clock.sleep(self._timings.pull)
            slot.waiting("ErrImagePull", why)
            await self._report()
            self._event("Failed", f'Failed to pull image "{name}": {why}', warning=True)
            await self._clock.sleep(self._timings.pull)
            slot.waiting("ImagePullBackOff", f'Back-off pulling image "{name}": ErrImagePull: {why}')
            await self._report()
            self._event("BackOff", f'Back-off pulling image "{name}"', warning=True)
            await self._clock.sleep(pause)
            pause = min(2 * pause, 300.0)

    def _site(self) -> Site:
        machine = self._machine
        own = machine.network.identity(self.uid) if machine.network is not None else ("", 0)
        return Site(self.pod, machine.registry.objects, self._volumes, self._folder, machine.rotate_at, *own)

    async def _configured(self, slot: Slot, image: Image) -> Launch:
        while True:
            try:
                return launch_of(slot, image, self._site())
            except (ConfigMissing, MountFailed) as error:
                slot.waiting("CreateContainerConfigError", str(error))
                await self._report()
                self._event("Failed", f"Error: {error}", warning=True)
                await self._clock.sleep(10.0)

    # -- running ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Until every container has ended, by itself or by what strikes; then the phase follows."""
        watched = [asyncio.create_task(self._watch(slot)) for slot in self._status.mains]
        others = [asyncio.create_task(one) for one in (self._play(), self._deadline(), self._look())]
        try:
            await asyncio.gather(*watched)
        finally:
            for task in (*watched, *others):
                task.cancel()
            await asyncio.wait([*watched, *others])
        for task in others:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        codes = [slot.exit_code for slot in self._status.mains]
        if not self._status.reason:
            await self._clock.sleep(self._timings.phase)
        await self._finish("Succeeded" if codes == [0] * len(codes) and not self._status.reason else "Failed")

    async def _watch(self, slot: Slot) -> None:
        if slot.container is None:
            return
        self._end(slot, await slot.container.wait())
        if not self._status.reason:  # of an evicted pod, container and phase are told together
            await self._report()

    def _end(self, slot: Slot, ended: Ended) -> None:
        """Record how a container ended."""
        if slot.state != "running":
            return
        slot.container = None
        forced = self._forced or ended
        code, oom = forced.code, forced.oom
        if self._scenario.strike == "oom-child" and self._struck:
            oom = True
        reason = "OOMKilled" if oom else "Completed" if code == 0 else "Error"
        slot.terminated(code, reason, last_words(slot, self._folder, code))

    async def _finish(self, phase: Phase) -> None:
        self._status.phase = phase
        await self._report()
        self._machine.nodes.release(self.uid)

    # -- what strikes -----------------------------------------------------------------------------------------------

    @property
    def _struck(self) -> bool:
        return self._planted is not None and self._planted.struck is not None

    @property
    def _alive(self) -> bool:
        """Whether there is anything left to strike: what has just ended by itself keeps its own end."""
        return any(slot.container is not None for slot in self._status.mains)

    def _strike(self) -> None:
        if self._planted is not None and self._planted.struck is None:
            self._planted.struck = asyncio.get_running_loop().time()

    async def _play(self) -> None:
        """The scenario's part in a running pod."""
        scenario = self._scenario
        if scenario.output:
            for slot in self._status.mains:
                if slot.log is not None:
                    slot.log.write((b"x" * 79 + b"\n") * (scenario.output // 80))
            self._strike()
        if not scenario.strike:
            return
        await self._clock.sleep(scenario.after + (self._timings.evict if scenario.strike == "evict" else 0.0))
        if not self._alive:
            return
        self._strike()
        match scenario.strike:
            case "exit":
                self._forced = Ended(scenario.exit_code)
            case "oom":
                self._forced = Ended(137, oom=True)
            case "evict":
                self._evict("Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. ")
                return
            case "deadline":
                self._fail("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
                if scenario.lingers:
                    self._status.phase = "Failed"
                    await self._report()
                    await self._clock.sleep(scenario.lingers)
            case "oom-child":
                for slot in self._status.mains:
                    if slot.container is not None:
                        slot.container.kill_child()
                return
            case "lose-node":
                assert self._node is not None
                self._machine.nodes.lose(self._node.spec.name)
                return
        self._kill_now()

    def _evict(self, why: str) -> None:
        self._fail("Evicted", why)
        self._event("Evicted", why, warning=True)
        self._kill_now()

    def _fail(self, reason: str, message: str) -> None:
        """The kubelet gives the pod up: it says why, and kills."""
        self._forced = Ended(137)
        self._status.reason, self._status.message = reason, message

    async def _deadline(self) -> None:
        seconds = self._spec.get("activeDeadlineSeconds")
        if seconds is None:
            return
        await self._clock.sleep_promised(seconds)
        await self._clock.sleep(self._timings.deadline)
        await self._online()
        if not self._alive:
            return
        for slot in self._status.mains:
            if slot.container is not None:
                slot.container.terminate()
        self._status.reason = "DeadlineExceeded"
        self._status.message = "Pod was active on the node longer than the specified deadline"
        await self._clock.sleep_promised(self._spec["terminationGracePeriodSeconds"])
        self._kill_now()

    async def _look(self) -> None:
        """The kubelet's look at logs and disk, again and again."""
        while True:
            await self._clock.sleep(self._timings.look)
            for slot in self.slots:
                if slot.log is not None:
                    slot.log.rotate()
            if any(slot.container is not None and slot.container.pid for slot in self._status.mains):
                why = await asyncio.to_thread(self._volumes.overfull)
                if why and self._alive and not self._status.reason:
                    self._evict(why)

    # -- stopping ---------------------------------------------------------------------------------------------------

    def _kill_now(self) -> None:
        for slot in self.slots:
            if slot.container is not None:
                slot.container.kill()

    async def _kill(self) -> None:
        self._kill_now()
        for slot in self.slots:
            if slot.container is not None:
                self._end(slot, await slot.container.wait())

    async def _stop(self) -> None:
        """Somebody wants the pod gone."""
        if not self.removed.is_set():
            await _first(self._online(), self.removed.wait())
        if not self.removed.is_set():
            self._event("Killing", f"Stopping container {self._status.mains[0].name}")
            await self._stop_gracefully()
        # a forced delete takes the object; what runs on a lost node goes on until its kubelet is back
        await self._online()
        await self._kill()
        if self.removed.is_set():
            return
        if self._status.scheduled and self._status.phase in ("Pending", "Running"):
            codes = [slot.exit_code for slot in self._status.mains]
            self._status.phase = "Succeeded" if codes == [0] * len(codes) else "Failed"
            await self._report()
        if self._scenario.removal_seconds:
            self._strike()
        pause = self._clock.sleep(self._timings.removal + self._scenario.removal_seconds)
        await _first(pause, self.removed.wait())
        await self._online()
        self._machine.registry.bury(self.key, self.uid)

    async def _stop_gracefully(self) -> None:
        stored = self._machine.registry.objects.find(PODS, self.key)
        grace = 0 if stored is None else stored.body["metadata"].get("deletionGracePeriodSeconds", 0)
        running = [slot for slot in self.slots if slot.container is not None]
        ends = [asyncio.create_task(slot.container.wait()) for slot in running if slot.container is not None]
        for slot in running:
            if slot.container is not None:
                slot.container.terminate()
        if ends:
            await _first(asyncio.wait(ends), self.removed.wait(), self._clock.sleep_promised(grace))
            await _first(self._online(), self.removed.wait())
        for slot, end in zip(running, ends, strict=True):
            if end.done():
                self._end(slot, end.result())
            end.cancel()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until the first of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _whole(start: Coroutine[Any, Any, Container]) -> Container:
    """Start it to the end even when we are cancelled meanwhile: what runs unknown would never be killed."""
    task = asyncio.create_task(start)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(StartRefused):
            (container := await task).kill()
            await container.wait()
        raise
