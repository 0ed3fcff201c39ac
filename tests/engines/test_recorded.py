"""The engine that answers from a record, and hands over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest

from openforgerl.engines.recorded import PIECE, RecordedEngine
from openforgerl.errors import EngineError
from openforgerl.trajectory.replaying import Record
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Chunk,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Prompt,
    Role,
    Sampling,
    Text,
    ThreadRole,
    WeightsSpan,
)


def call(index: int, ids: tuple[int, ...], finish: FinishReason = FinishReason.STOP, **fields: object) -> ModelCall:
    whole: dict[str, object] = {
        "call_id": f"c{index}",
        "session_id": "s",
        "index": index,
        "dialect": "chat",
        "thread": "main",
        "role": ThreadRole.MAIN,
        "role_evidence": "",
        "parent_call_id": None,
        "status": CallStatus.COMPLETE,
        "conversation": Conversation(messages=(Message(role=Role.USER, parts=(Text("go"),)),)),
        "prompt": Prompt(ids=(1, 2, 3)),
        "sampled_ids": ids,
        "logprobs": tuple(-0.1 * at for at in range(len(ids))),
        "weights_version": 4,
        "finish_reason": finish,
        "timing": CallTiming(received=0.0),
    }
    return ModelCall(**(whole | fields))  # type: ignore[arg-type]


class Live:
    model_name, context_length, weights_version = "live", 99, 7

    def __init__(self) -> None:
        self.closed = 0

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        yield Chunk(ids=(70,), logprobs=(-1.0,), weights_version=7, finish=FinishReason.STOP)

    async def close(self) -> None:
        self.closed += 1


def engine(*calls: ModelCall, **fields: object) -> RecordedEngine:
    return RecordedEngine(Record(calls), model_name="m", context_length=10, **fields)  # type: ignore[arg-type]


async def answered(engine: RecordedEngine, index: int = 0) -> list[Chunk]:
    """What the engine says to a new call of thread main."""
    new = call(index, (), prompt=Prompt(ids=(1, 2, 3)))
    engine.asked(new)
    return [chunk async for chunk in engine.generate(new.prompt, Sampling(), affinity="s")]


async def test_ids_log_probs_and_versions_are_those_of_the_record() -> None:
    ids = tuple(range(10, 10 + 2 * PIECE))
    spans = (WeightsSpan(start=0, stop=3, version=4), WeightsSpan(start=3, stop=len(ids), version=5))
    recorded = call(0, ids, weights_spans=spans)
    chunks = await answered(engine(recorded))
    assert sum((chunk.ids for chunk in chunks), ()) == ids
    assert sum((chunk.logprobs or () for chunk in chunks), ()) == recorded.logprobs
    assert [(chunk.ids[0], chunk.weights_version) for chunk in chunks[:-1]] == [(10, 4), (13, 5), (13 + PIECE, 5)]
    assert [chunk.finish for chunk in chunks] == [None, None, None, FinishReason.STOP]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP_STRING])
async def test_what_ended_without_a_stop_token_ends_so_again(finish: FinishReason) -> None:
    chunks = await answered(engine(call(0, (5, 6), finish, logprobs=None)))
    assert [(chunk.ids, chunk.logprobs, chunk.finish) for chunk in chunks] == [
        ((5, 6), None, None),
        ((), None, FinishReason.LENGTH),
    ]


@pytest.mark.parametrize("status", [CallStatus.ABORTED, CallStatus.ERROR, CallStatus.INTENT])
async def test_a_cut_comes_at_the_same_token(status: CallStatus) -> None:
    found = engine(call(0, (5, 6), FinishReason.ERROR, status=status, error="broke"))
    new = call(0, ())
    found.asked(new)
    stream = found.generate(new.prompt, Sampling(), affinity="s")
    assert (await anext(stream)).ids == (5, 6)
    with pytest.raises(EngineError, match="c0 was cut here: broke"):
        await anext(stream)


async def test_what_the_record_does_not_hold_is_refused_and_prompts_must_be_announced() -> None:
    found = engine(call(0, (5,)))
    await answered(found)
    with pytest.raises(EngineError, match="no further call of thread 'main'") as refused:
        await answered(found, 1)
    assert refused.value.status == 400  # a server error would be tried again
    with pytest.raises(EngineError, match="asked must hear of every call"):
        await anext(found.generate(Prompt(ids=(1,)), Sampling(), affinity="s"))


async def test_two_calls_with_equal_prompts_get_their_own_answers() -> None:
    found = engine(call(0, (5,)), call(1, (6,)))
    first, second = call(0, ()), call(1, ())
    assert first.prompt == second.prompt
    found.asked(first)
    found.asked(second)
    later = [chunk.ids async for chunk in found.generate(second.prompt, Sampling(), affinity="s")]
    earlier = [chunk.ids async for chunk in found.generate(first.prompt, Sampling(), affinity="s")]
    assert (earlier[0], later[0]) == ((5,), (6,))


async def test_from_the_fork_on_and_beyond_the_record_the_live_engine_answers() -> None:
    live = Live()
    found = engine(call(0, (5,)), call(1, (6,)), live=live, fork=1)
    assert (await answered(found))[0].ids == (5,)
    assert (await answered(found, 1))[0].ids == (70,)
    assert (await answered(found, 2))[0].ids == (70,)
    assert (found.model_name, found.context_length, found.weights_version) == ("m", 10, 7)
    await found.close()
    assert live.closed == 1


def test_a_replayed_record_is_what_was_recorded() -> None:
    recorded = call(0, (5, 6))
    assert Record([recorded]).next(msgspec.structs.replace(recorded, call_id="new")) is recorded
