"""Whose failure is it? The table of DESIGN §5 Outcomes, row by row."""

from __future__ import annotations

import msgspec
import pytest

from openforgerl.errors import StageError
from openforgerl.rollout import OnTimeout, judge
from openforgerl.rollout.judging import time_spent
from openforgerl.types import CallStatus, CallTiming, Conversation, Ending, Exit, ModelCall, Origin, Prompt, ThreadRole

FINISHED = Ending(kind="finished", by_policy=False, evidence="exit 0")


def call(status: CallStatus, error: str = "engine_error: the engine broke") -> ModelCall:
    return ModelCall(
        call_id=f"c-{status}",
        session_id="s",
        index=0,
        dialect="chat",
        thread="t",
        role=ThreadRole.MAIN,
        role_evidence="first",
        parent_call_id=None,
        status=status,
        conversation=Conversation(messages=()),
        prompt=Prompt(ids=()),
        weights_version=0,
        timing=CallTiming(received=0.0),
        error=error if status in (CallStatus.ERROR, CallStatus.ABORTED) else None,
    )


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (FINISHED, "finished"),
        (Ending(kind="gave_up", by_policy=True, evidence=""), "gave_up"),
        (Ending(kind="limit", by_policy=True, evidence=""), "limit"),
        (Ending(kind="crashed", by_policy=True, evidence="bad tool call"), "crashed_by_policy"),
    ],
)
def test_what_the_model_caused_is_graded(ending: Ending, expected: str) -> None:
    assert judge(Exit(code=0), ending, [call(CallStatus.COMPLETE)], OnTimeout.DISCARD) == expected


@pytest.mark.parametrize("on_timeout", list(OnTimeout))
@pytest.mark.parametrize(
    ("exit", "ending", "statuses", "kind", "origin"),
    [
        (
            Exit(code=1),
            Ending(kind="crashed", by_policy=False, evidence="exit 1"),
            [CallStatus.COMPLETE],
            "crash",
            Origin.HARNESS,
        ),
        (
            Exit(code=None, signal=9),
            Ending(kind="crashed", by_policy=False, evidence="killed"),
            [],
            "crash",
            Origin.HARNESS,
        ),
        (Exit(code=137, oom=True), FINISHED, [CallStatus.COMPLETE], "oom", Origin.INFRASTRUCTURE),
        (Exit(code=0), FINISHED, [CallStatus.COMPLETE, CallStatus.ERROR], "model_call", Origin.INFRASTRUCTURE),
        (
            Exit(code=1),
            Ending(kind="crashed", by_policy=True, evidence=""),
            [CallStatus.ERROR],
            "model_call",
            Origin.INFRASTRUCTURE,
        ),
    ],
)
def test_no_setting_turns_our_failures_into_a_reward(
    exit: Exit, ending: Ending, statuses: list[CallStatus], kind: str, origin: Origin, on_timeout: OnTimeout
) -> None:
    with pytest.raises(StageError) as raised:
        judge(exit, ending, [call(status) for status in statuses], on_timeout)
    assert (raised.value.kind, raised.value.origin, raised.value.retryable) == (kind, origin, True)


def test_an_engine_error_that_the_harness_survived_is_no_failure() -> None:
    calls = [call(CallStatus.ERROR), call(CallStatus.COMPLETE)]
    assert judge(Exit(code=0), FINISHED, calls, OnTimeout.DISCARD) == "finished"


@pytest.mark.parametrize("on_timeout", list(OnTimeout))
def test_a_conversation_that_outgrew_the_context_is_graded(on_timeout: OnTimeout) -> None:
    """The context is one of the policy's limits, though its refusal is recorded as a call in error."""
    full = call(CallStatus.ERROR, "context_length_exceeded: This model's maximum context length is 300 tokens.")
    limit = Ending(kind="limit", by_policy=True, evidence="context")
    assert judge(Exit(code=1), limit, [call(CallStatus.COMPLETE), full], on_timeout) == "limit"


@pytest.mark.parametrize("error", ["proxy_shutdown", "session_deadline"])
def test_a_harness_that_ends_well_on_a_call_that_we_cut_gets_no_reward(error: str) -> None:
    calls = [call(CallStatus.COMPLETE), call(CallStatus.ABORTED, error)]
    with pytest.raises(StageError) as raised:
        judge(Exit(code=0), FINISHED, calls, OnTimeout.GRADE)
    assert (raised.value.kind, raised.value.origin) == ("model_call", Origin.INFRASTRUCTURE)


@pytest.mark.parametrize("error", ["client_left", "session_sealed"])
def test_a_call_that_the_harness_gave_up_or_left_behind_is_no_failure(error: str) -> None:
    calls = [call(CallStatus.COMPLETE), call(CallStatus.ABORTED, error)]
    assert judge(Exit(code=0), FINISHED, calls, OnTimeout.DISCARD) == "finished"


@pytest.mark.parametrize(
    ("on_timeout", "graded"),
    [
        (OnTimeout.DISCARD, False),
        (OnTimeout.PARTIAL, False),
        (OnTimeout.GRADE, True),
        (OnTimeout.ZERO, True),
    ],
)
def test_a_wall_clock_limit_follows_the_setting(on_timeout: OnTimeout, graded: bool) -> None:
    exit = Exit(code=None, signal=9, timed_out=True, seconds=60.2)
    if graded:
        assert judge(exit, FINISHED, [call(CallStatus.COMPLETE)], on_timeout) == "limit:time"
        return
    with pytest.raises(StageError, match="still running after 60 s") as raised:
        judge(exit, FINISHED, [call(CallStatus.COMPLETE)], on_timeout)
    assert raised.value.origin is Origin.BUDGET


def timed(received: float, finished: float | None) -> ModelCall:
    return msgspec.structs.replace(call(CallStatus.COMPLETE), timing=CallTiming(received=received, finished=finished))


@pytest.mark.parametrize(
    ("calls", "model", "slow"),
    [
        ([], 0.0, "harness"),
        ([(0.0, 2.0), (5.0, 6.0)], 3.0, "tools"),
        # calls side by side count once: [0, 4] and [1, 3] and [3, 7] are 7 seconds
        ([(0.0, 4.0), (1.0, 3.0), (3.0, 7.0)], 7.0, "model"),
        # one that never finished was under way until the last sign of life
        ([(0.0, None), (2.0, 8.0)], 8.0, "model"),
    ],
)
def test_a_timeout_says_who_was_slow(calls: list[tuple[float, float | None]], model: float, slow: str) -> None:
    recorded = [timed(*one) for one in calls]
    spent = time_spent(recorded, 10.0)
    assert (spent.model, spent.elsewhere, spent.slow) == (model, 10.0 - model, slow)
    with pytest.raises(StageError) as caught:
        judge(Exit(code=None, timed_out=True, seconds=10.0), FINISHED, recorded, OnTimeout.DISCARD)
    assert caught.value.evidence["slow"] == slow
