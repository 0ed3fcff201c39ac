"""How an attempt ends: `Outcome` is exactly one of `Verdict` or `Failure`."""

from __future__ import annotations

import enum
import math

import msgspec


class Stage(enum.StrEnum):
    """Where in an attempt something happened, in order."""

    SESSION = "session"
    SANDBOX = "sandbox"
    SETUP = "setup"
    RUN = "run"
    SEAL = "seal"
    KILL = "kill"
    VERIFY = "verify"
    COMMIT = "commit"


class Origin(enum.StrEnum):
    """Whose failure it is. The first three are ours and never get a reward; the last two are the model's."""

    INFRASTRUCTURE = "infrastructure"
    HARNESS = "harness"
    VERIFIER = "verifier"
    POLICY = "policy"
    BUDGET = "budget"

    @property
    def ours(self) -> bool:
        """True when no setting may turn this into a reward (DESIGN §5 Outcomes)."""
        return self in (Origin.INFRASTRUCTURE, Origin.HARNESS, Origin.VERIFIER)


class GradedHow(enum.StrEnum):
    """How a verdict came to be."""

    VERIFIER = "verifier"
    """The task's verifier ran on the state as left."""
    ASSIGNED = "assigned"
    """No verifier ran: a setting assigned it (`on_timeout = "zero"`), or the policy left more than can be carried."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """A valid reward and what it rests on."""

    reward: float
    """Finite, inside `reward_range`."""
    passed: bool
    """Whether the task counts as solved (pass@k)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Declared inclusive range of `reward`."""
    metrics: dict[str, float] = {}
    """Further named numbers of the verifier; finite."""
    evidence: dict[str, str] = {}
    """What a person needs to believe it: output tail, file digests, exit code."""
    graded: GradedHow = GradedHow.VERIFIER
    ending: str = "finished"
    """How the harness ended before grading: finished, gave_up, limit:<which>, crashed_by_policy. `limit:state`: it left
    more than can be carried to a verifier."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range must be two finite numbers, low < high; got {self.reward_range}")
        if not (math.isfinite(self.reward) and low <= self.reward <= high):
            raise ValueError(f"reward must be a finite number in [{low}, {high}]; got {self.reward!r}")
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name!r} must be finite; got {value!r}")


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """No reward: where it broke, whose fault, whether to try again, and what shows it."""

    stage: Stage
    kind: str
    origin: Origin
    message: str
    retryable: bool
    evidence: dict[str, str] = {}


Outcome = Verdict | Failure
