"""The sections every verb that runs attempts shares. Rooms above this floor add their own by inheritance."""

from __future__ import annotations

import msgspec

from openforgerl.engines.options import EngineOptions
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.proxy.options import ProxyOptions
from openforgerl.rollout import RolloutOptions
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.trajectory.options import SamplePolicy
from openforgerl.types import SandboxLimits


class TasksOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks."""

    path: str = ""
    """A Harbor task directory, or a directory of them."""
    split: str | None = None
    """Keep only tasks whose `[metadata] split` is this."""
    limit: int | None = None
    """Keep only the first so many, in name order."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"tasks.limit must be 1 or more; got {self.limit}")


class RoomsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attempt needs, section by section; each section's fields are documented at its class."""

    seed: int = 0
    """Of the whole run: plans, sampling, initialisation and shuffling derive from it."""
    tasks: TasksOptions = TasksOptions()
    engine: EngineOptions = EngineOptions()
    tokenizer: str = ""
    """Directory with tokenizer and chat template; empty = the engine's own (`torch`)."""
    proxy: ProxyOptions = ProxyOptions()
    backend: str = "process"
    """Sandbox backend: a registry name or `module:Class`."""
    sandbox: SandboxOptions = SandboxOptions()
    limits: SandboxLimits = SandboxLimits()
    """Of each sandbox; a task may ask for less memory, not for more."""
    harness: HarnessOptions = HarnessOptions()
    mix: dict[str, float] = {}
    """Several harnesses instead of `harness.name`: harness → weight. Training draws one for each group by weight (a
    group never mixes them); `run` and `eval` run every task in each. Their settings are those in `[harness]`."""
    rollout: RolloutOptions = RolloutOptions()
    samples: SamplePolicy = SamplePolicy()
    """Which of the sampled tokens train."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self.limits):
            value: int | None = getattr(self.limits, field.name)
            if value is not None and value < 1:
                raise ValueError(f"limits.{field.name} must be 1 or more; got {value}")
        for name, weight in self.mix.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"mix.{name} must be a weight above 0; got {weight}")

    @property
    def harnesses(self) -> dict[str, float]:
        """The harnesses of this run and their weights."""
        return self.mix or {self.harness.name: 1.0}
