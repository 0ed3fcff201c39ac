"""What an ending means: grade the state as left, assign a reward by policy, or fail (DESIGN §5 Outcomes)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from openforgerl.errors import StageError
from openforgerl.types import CallStatus, Ending, Exit, ModelCall, Origin, Stage

OVERFLOW = "context_length_exceeded"
"""Error code of a call that we refused because the policy's conversation outgrew the context: no failure of ours."""

CUT_BY_US = ("proxy_shutdown", "session_deadline")
"""Why calls were cut that a harness still waited for. (`session_sealed` is not here: sealing follows the harness's
exit, so such a call was a leftover's.)"""


class OnTimeout(enum.StrEnum):
    """What a wall-clock limit on the harness means."""

    DISCARD = "discard"
    """A Failure of origin `budget`, refilled. The paper's rule and the default."""
    GRADE = "grade"
    """The verifier grades the state as left."""
    ZERO = "zero"
    """The lowest reward of the task's range, marked as assigned."""
    PARTIAL = "partial"
    """A Failure like `discard`, but the attempt's complete calls are kept as samples for study and SFT."""


class RolloutOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one attempt is run and judged."""

    on_timeout: OnTimeout = OnTimeout.DISCARD
    """`discard` (default), `grade`, `zero` or `partial`."""
    agent_timeout: float | None = None
    """Seconds of wall clock for the harness; None takes the task's own (Harbor `[agent] timeout_sec`)."""
    calls: int = 50
    """Most model calls of one attempt: a loop that never ends is cut, graded and counted as `limit`."""
    sampled_tokens: int = 65536
    """Most sampled tokens of one attempt."""
    max_output_tokens: int = 4096
    """Most sampled tokens of one call; the harness is told so."""
    export_mb: int = 64
    """Largest state carried from the agent's sandbox to the grading sandbox."""
    start_timeout: float = 900.0
    """Seconds until a sandbox must be there (a cluster may have to pull an image), and as many to set it up."""
    attempt_timeout: float | None = None
    """Seconds for the whole attempt, start and verification included. Past it the attempt is a failure of ours,
    discarded and refilled: the time limit for the model is `agent_timeout`. None = the sum of the stages' limits."""

    def __post_init__(self) -> None:
        for name in ("calls", "sampled_tokens", "max_output_tokens", "export_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more; got {getattr(self, name)}")
        for name in ("agent_timeout", "start_timeout", "attempt_timeout"):
            seconds: float | None = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds; got {seconds}")


def judge(exit: Exit, ending: Ending, calls: Sequence[ModelCall], on_timeout: OnTimeout) -> str:
    """How the attempt ended, as `Verdict.ending`, when it may be graded; raises `StageError` when it may not.

    Failures that are ours come first: no setting turns them into a reward. An engine error that the harness
    survived (it retried and went on) is no failure; one that it ended on is. A prompt that outgrew the context is
    the policy's own doing.
    """
    last = calls[-1] if calls else None
    if last is not None and last.status in (CallStatus.ERROR, CallStatus.INTENT) and _error_code(last) != OVERFLOW:
        raise StageError(
            Stage.RUN,
            "model_call",
            f"the harness ended on a model call that failed on our side: {last.error or last.status}",
            origin=Origin.INFRASTRUCTURE,
            retryable=True,
            evidence={"call_id": last.call_id, "exit": exit.code, "stderr": _tail(exit.stderr)},
        )
    if exit.oom:
        raise StageError(
            Stage.RUN,
            "oom",
            "the sandbox ran out of memory",
            origin=Origin.INFRASTRUCTURE,
            retryable=True,
            evidence={"exit": exit.code, "signal": exit.signal},
        )
    if exit.timed_out:
        if on_timeout in (OnTimeout.GRADE, OnTimeout.ZERO):
            return "limit:time"
        spent = time_spent(calls, exit.seconds)
        raise StageError(
            Stage.RUN,
            "timeout",
            f"the harness was still running after {exit.seconds:.0f} s ({spent.words})",
            origin=Origin.BUDGET,
            retryable=True,
            evidence={
                "slow": spent.slow,
                "seconds_in_model_calls": round(spent.model, 1),
                "calls": len(calls),
                "stdout": _tail(exit.stdout),
            },
        )
    if last is not None and last.status is CallStatus.ABORTED and _error_code(last) in CUT_BY_US:
        raise StageError(
            Stage.RUN,
            "model_call",
            f"the harness ended on a model call that we cut: {last.error}",
            origin=Origin.INFRASTRUCTURE,
            retryable=True,
            evidence={"call_id": last.call_id, "exit": exit.code, "stderr": _tail(exit.stderr)},
        )
    if ending.kind == "crashed" and not ending.by_policy:
        raise StageError(
            Stage.RUN,
            "crash",
            f"the harness crashed: {ending.evidence}",
            origin=Origin.HARNESS,
            retryable=True,
            evidence={
                "exit": exit.code,
                "signal": exit.signal,
                "stdout": _tail(exit.stdout),
                "stderr": _tail(exit.stderr),
            },
        )
    return "crashed_by_policy" if ending.kind == "crashed" else ending.kind


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the time of an attempt went that ran out of it."""

    model: float
    """Seconds in which at least one model call was under way."""
    elsewhere: float
    """The other seconds: tools, and the harness itself."""
    calls: int

    @property
    def slow(self) -> str:
        """`model`, `tools`, or `harness` when it never called the model. A sandbox that stalls does not get here:
        its own stage has a limit."""
        if not self.calls:
            return "harness"
        return "model" if self.model > self.elsewhere else "tools"

    @property
    def words(self) -> str:
        if not self.calls:
            return "it never called the model"
        return f"{self.model:.0f} s in {self.calls} model calls, {self.elsewhere:.0f} s in tools and the harness"


def time_spent(calls: Sequence[ModelCall], seconds: float) -> TimeSpent:
    """Divide `seconds` of wall clock by the calls' timings. A call that never finished was under way to the end."""
    if not calls:
        return TimeSpent(0.0, seconds, 0)
    end = max(call.timing.finished or call.timing.received for call in calls)
    model = reached = 0.0
    for begun, finished in sorted((call.timing.received, call.timing.finished or end) for call in calls):
        model += max(0.0, finished - max(begun, reached))
        reached = max(reached, finished)
    return TimeSpent(model, max(0.0, seconds - model), len(calls))


def _error_code(call: ModelCall) -> str:
    return (call.error or "").partition(":")[0]


def _tail(data: bytes) -> str:
    return data[-1500:].decode("utf-8", errors="replace")
