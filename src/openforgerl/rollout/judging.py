"""What an ending means: grade the state as left, assign a reward by policy, or fail (DESIGN §5 Outcomes)."""

from __future__ import annotations

import enum
from collections.abc import Sequence

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

    def __post_init__(self) -> None:
        for name in ("calls", "sampled_tokens", "max_output_tokens", "export_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more; got {getattr(self, name)}")
        if self.agent_timeout is not None and not self.agent_timeout > 0:
            raise ValueError(f"agent_timeout must be above 0 seconds; got {self.agent_timeout}")


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
        raise StageError(
            Stage.RUN,
            "timeout",
            f"the harness was still running after {exit.seconds:.0f} s",
            origin=Origin.BUDGET,
            retryable=True,
            evidence={"calls": len(calls), "stdout": _tail(exit.stdout)},
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


def _error_code(call: ModelCall) -> str:
    return (call.error or "").partition(":")[0]


def _tail(data: bytes) -> str:
    return data[-1500:].decode("utf-8", errors="replace")
