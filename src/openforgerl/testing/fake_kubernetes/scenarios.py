"""What can go wrong with a pod, by name, as it was seen on a real cluster; and the oracle that knows where it did."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Strike = Literal["", "exit", "oom", "oom-child", "evict", "lose-node", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the API shows in the end. Empty: not there. `exit_code` None: no container ever ran."""

    phase: str
    pod_reason: str = ""
    container_reason: str = ""
    exit_code: int | None = None
    waiting_reason: str = ""
    condition: str = ""
    """`type=status reason`, of the condition that tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the table. Seconds are the cluster's."""

    name: str
    shown: Shown | None = None
    """None: the pod ends as it would have without it."""
    unschedulable: bool = False
    pull: Literal["", "missing", "never"] = ""
    pull_seconds: float = 0.0
    """A slow pull: ContainerCreating for so long."""
    start_error: str = ""
    strike: Strike = ""
    """What happens to the running container."""
    after: float = 1.0
    """Running → strike. An eviction and a lost node have the cluster's own times on top."""
    exit_code: int = 0
    lingers: float = 0.0
    """A deadline: so long the container still runs after the phase says Failed."""
    removal_seconds: float = 0.0
    """Deletion: so much longer until the object is gone."""
    create: Literal["", "lost-answer", "throttled", "quota"] = ""
    """What the first create of this name is answered."""
    watch: Literal["", "lost", "late"] = ""
    """What watches see of the pod once it has run: nothing, or everything `watch_seconds` late."""
    watch_seconds: float = 0.0
    output: int = 0
    """Bytes that the container prints on top of its own."""

    @property
    def infrastructure(self) -> bool:
        """Whether the pod is lost by no doing of the program in it."""
        return self.shown is not None and self.strike != "exit"


def _scenarios() -> Iterator[Scenario]:
    yield Scenario(
        name="exit-0",
        strike="exit",
        shown=Shown(phase="Succeeded", container_reason="Completed", exit_code=0),
    )
    yield Scenario(
        name="exit-3",
        strike="exit",
        exit_code=3,
        shown=Shown(phase="Failed", container_reason="Error", exit_code=3),
    )
    yield Scenario(
        name="oom",
        strike="oom",
        shown=Shown(phase="Failed", container_reason="OOMKilled", exit_code=137),
    )
    yield Scenario(
        name="oom-child",
        strike="oom-child",
        shown=Shown(phase="Succeeded", container_reason="OOMKilled", exit_code=0),
    )
    yield Scenario(
        name="deadline",
        strike="deadline",
        shown=Shown(phase="Failed", pod_reason="DeadlineExceeded", container_reason="Error", exit_code=137),
    )
    yield Scenario(
        name="deadline-early",
        strike="deadline",
        lingers=2.0,
        shown=Shown(phase="Failed", pod_reason="DeadlineExceeded"),
    )
    yield Scenario(
        name="image-missing", pull="missing", shown=Shown(phase="Pending", waiting_reason="ImagePullBackOff")
    )
    yield Scenario(name="image-never", pull="never", shown=Shown(phase="Pending", waiting_reason="ErrImageNeverPull"))
    yield Scenario(name="slow-pull", pull_seconds=30.0)
    yield Scenario(
        name="unschedulable",
        unschedulable=True,
        shown=Shown(phase="Pending", condition="PodScheduled=False Unschedulable"),
    )
    yield Scenario(
        name="evicted",
        strike="evict",
        after=0.0,
        shown=Shown(phase="Failed", pod_reason="Evicted", container_reason="Error", exit_code=137),
    )
    yield Scenario(
        name="start-error",
        start_error='exec: "/no/such/program": stat /no/such/program: no such file or directory: unknown',
        shown=Shown(phase="Failed", container_reason="StartError", exit_code=128),
    )
    yield Scenario(name="node-lost", strike="lose-node", shown=Shown(phase="Running", condition="Ready=False "))
    yield Scenario(name="slow-delete", removal_seconds=20.0)
    yield Scenario(name="log-rotation", output=30 << 20)
    yield Scenario(name="create-conflict", create="lost-answer")
    yield Scenario(name="throttled-create", create="throttled")
    yield Scenario(name="quota", create="quota")
    yield Scenario(name="lost-events", watch="lost")
    yield Scenario(name="late-events", watch="late", watch_seconds=5.0)


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}
"""Every scenario by name, with the times of the facts."""

FAULTS = (
    "exit-3",
    "oom",
    "oom-child",
    "deadline",
    "image-missing",
    "image-never",
    "unschedulable",
    "evicted",
    "start-error",
    "node-lost",
    "slow-delete",
    "create-conflict",
    "throttled-create",
    "quota",
    "lost-events",
    "late-events",
)
"""Those that random faults are drawn from."""


@dataclass(slots=True)
class Planted:
    """What the oracle knows of one pod. `struck`: seconds of the event loop's clock, None while nothing happened.

    A scenario that needs a running container never strikes a pod that ends or goes before.
    """

    namespace: str
    name: str
    uid: str
    scenario: Scenario
    node: str = ""
    struck: float | None = None
    creates: int = 0
    """Creates of this name that were answered with the scenario's refusal."""


@dataclass(slots=True)
class _Rule:
    scenario: Scenario
    name: str
    image: str

    def takes(self, name: str, images: Sequence[str]) -> bool:
        return fnmatch.fnmatchcase(name, self.name) and any(fnmatch.fnmatchcase(image, self.image) for image in images)


@dataclass(slots=True)
class _Draw:
    rate: float
    seed: int
    among: tuple[Scenario, ...]
    name: str

    def take(self, name: str) -> Scenario | None:
        """The same for the same name and seed, in whatever order pods are made."""
        if not fnmatch.fnmatchcase(name, self.name):
            return None
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        if int.from_bytes(digest[:8], "big") / 2**64 >= self.rate:
            return None
        return self.among[int.from_bytes(digest[8:16], "big") % len(self.among)]


@dataclass(slots=True)
class Scenarios:
    """Which pod gets which scenario, and the oracle. The first rule that fits wins, then the random ones."""

    planted: dict[str, Planted] = field(default_factory=dict[str, Planted])
    """Pod uid → what was planted. Pods without a scenario are not in it."""
    _rules: list[_Rule] = field(default_factory=list[_Rule])
    _draws: list[_Draw] = field(default_factory=list[_Draw])
    _refused: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def attach(self, scenario: str | Scenario, *, name: str = "*", image: str = "*", **changes: object) -> Scenario:
        """Plant a scenario in every pod whose name and one of whose images fit the patterns.

        `changes`: fields to play it with, such as `after=0.2`.
        """
        chosen = replace(named(scenario), **changes)  # pyright: ignore[reportArgumentType]
        self._rules.append(_Rule(chosen, name, image))
        return chosen

    def at_random(self, rate: float, *, seed: int, among: Sequence[str | Scenario] = FAULTS, name: str = "*") -> None:
        """Plant one of `among` in a share `rate` of the pods; which one depends on `seed` and the pod's name."""
        self._draws.append(_Draw(rate, seed, tuple(named(one) for one in among), name))

    def clear(self) -> None:
        """Plant nothing more. What is planted stays."""
        self._rules.clear()
        self._draws.clear()

    def choose(self, name: str, images: Sequence[str]) -> Scenario | None:
        """The scenario of a pod of that name."""
        for rule in self._rules:
            if rule.takes(name, images):
                return rule.scenario
        return next((found for draw in self._draws if (found := draw.take(name)) is not None), None)

    def plant(self, namespace: str, name: str, uid: str, images: Sequence[str]) -> Planted | None:
        """Choose for a pod that is there now, and remember."""
        scenario = self.choose(name, images)
        if scenario is None:
            return None
        creates = self._refused.get((namespace, name), 0)
        planted = self.planted[uid] = Planted(namespace, name, uid, scenario, creates=creates)
        if creates:
            planted.struck = asyncio.get_running_loop().time()
        return planted

    def refuse_create(self, namespace: str, name: str, images: Sequence[str]) -> str:
        """How a create of this name is to be refused; empty when it is not (any more)."""
        scenario = self.choose(name, images)
        if scenario is None or not scenario.create or self._refused.get((namespace, name)):
            return ""
        self._refused[namespace, name] = 1
        return scenario.create

    def of(self, name: str) -> list[Planted]:
        """What was planted in the pods of that name, one after another."""
        return [planted for planted in self.planted.values() if planted.name == name]


def named(scenario: str | Scenario) -> Scenario:
    """A scenario by its name. Raises KeyError with the names there are."""
    if isinstance(scenario, Scenario):
        return scenario
    if scenario not in SCENARIOS:
        raise KeyError(f"no scenario {scenario!r}: one of {', '.join(SCENARIOS)}")
    return SCENARIOS[scenario]
