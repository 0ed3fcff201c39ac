"""A pod's status as its kubelet tells it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from openforgerl.testing.fake_kubernetes.clock import Clock
from openforgerl.testing.fake_kubernetes.containers import Container, ContainerLog, digest_of
from openforgerl.testing.fake_kubernetes.kinds import Object

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(slots=True)
class Slot:
    """One container of a pod, from before it runs until after."""

    spec: dict[str, Any]
    container: Container | None = None
    """While it runs."""
    log: ContainerLog | None = None
    """Once it was started."""
    state: Literal["waiting", "running", "terminated"] = "waiting"
    exit_code: int | None = None
    _told: dict[str, Any] = field(default_factory=lambda: {"reason": "ContainerCreating"})
    _identity: str = field(default_factory=lambda: f"containerd://{secrets.token_hex(32)}")

    @property
    def name(self) -> str:
        """The container's."""
        return self.spec["name"]

    @property
    def reason(self) -> str:
        """Why it waits or ended."""
        return self._told.get("reason", "")

    def waiting(self, reason: str, message: str = "") -> None:
        """It cannot start (yet)."""
        self._told = {"reason": reason} | ({"message": message} if message else {})

    def running(self) -> None:
        """It has started."""
        self.state, self._told = "running", {"startedAt": Clock.now()}

    def terminated(self, code: int, reason: str, message: str = "", *, started: str = "") -> None:
        """It has ended."""
        told = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started or self._told.get("startedAt", Clock.now()),
            "finishedAt": Clock.now(),
            "containerID": self._identity,
        }
        self.state, self.exit_code, self._told = "terminated", code, told | ({"message": message} if message else {})

    def body(self) -> Object:
        """Its entry in containerStatuses."""
        ran = self.state != "waiting"
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": digest_of(self.spec["image"]) if ran else "",
            "containerID": self._identity if ran else "",
            "ready": self.state == "running",
            "started": self.state == "running",
            "restartCount": 0,
            "state": {self.state: self._told},
            "lastState": {},
        }


@dataclass(slots=True)
class PodStatus:
    """What `body` makes the status of."""

    pod: Object
    address: str
    phase: Phase = "Pending"
    reason: str = ""
    message: str = ""
    scheduled: bool = False
    unschedulable: str = ""
    """The scheduler's complaint."""
    accepted: str = ""
    """When the kubelet took the pod: its startTime."""
    initialized: bool = False
    inits: list[Slot] = field(default_factory=list[Slot])
    mains: list[Slot] = field(default_factory=list[Slot])
    _conditions: dict[str, Object] = field(default_factory=dict[str, Object])

    def __post_init__(self) -> None:
        spec = self.pod["spec"]
        self.inits = [Slot(one) for one in spec.get("initContainers") or []]
        self.mains = [Slot(one) for one in spec["containers"]]
        if self.inits:
            for slot in self.mains:
                slot.waiting("PodInitializing")

    @property
    def slots(self) -> list[Slot]:
        """All, in the order in which they start."""
        return [*self.inits, *self.mains]

    def body(self) -> Object:
        """As the API shows it."""
        status: Object = {
            "phase": self.phase,
            "conditions": self._all_conditions(),
            "qosClass": self.pod["status"]["qosClass"],
        }
        for name, value in (("reason", self.reason), ("message", self.message), ("startTime", self.accepted)):
            if value:
                status[name] = value
        if self.accepted:
            status |= {"hostIP": "127.0.0.1", "hostIPs": [{"ip": "127.0.0.1"}]}
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
            status["containerStatuses"] = [slot.body() for slot in self.mains]
            if self.inits:
                status["initContainerStatuses"] = [slot.body() for slot in self.inits]
        return status

    def _all_conditions(self) -> list[Object]:
        if not self.scheduled:
            if self.unschedulable:
                self._condition("PodScheduled", False, "Unschedulable", self.unschedulable)
            return list(self._conditions.values())
        self._condition("PodScheduled", True)
        if not self.accepted:
            return list(self._conditions.values())
        ended = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(self.phase, "")
        ready = not ended and all(slot.state == "running" for slot in self.mains)
        unready = [slot.name for slot in self.mains if slot.state != "running"]
        why = "" if ready else ended or "ContainersNotReady"
        message = "" if ready or ended else f"containers with unready status: [{' '.join(unready)}]"
        self._condition("PodReadyToStartContainers", not ended)
        if self.initialized or not self.inits:
            self._condition("Initialized", True, ended if ended == "PodCompleted" else "")
        else:
            self._condition("Initialized", False, "ContainersNotInitialized")
        self._condition("Ready", ready, why, message)
        self._condition("ContainersReady", ready, why, message)
        if self.reason == "Evicted":
            self._condition("DisruptionTarget", True, "TerminationByKubelet", self.message)
        return list(self._conditions.values())

    def _condition(self, name: str, holds: bool, reason: str = "", message: str = "") -> None:
        before = self._conditions.get(name, {})
        status = "True" if holds else "False"
        changed = before.get("status") != status
        condition: Object = {
            "type": name,
            "status": status,
            "lastProbeTime": None,
            "lastTransitionTime": Clock.now() if changed else before["lastTransitionTime"],
        }
        condition |= {"reason": reason} if reason else {}
        self._conditions[name] = condition | ({"message": message} if message else {})
