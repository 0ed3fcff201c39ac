"""What a session holds in memory grows with what is new in its calls, not with their length."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from openforgerl.proxy.known import KnownCalls
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    ModelCall,
    OriginSpan,
    PlacedImage,
    Prompt,
    ThreadRole,
)


def call(number: int, ids: tuple[int, ...], parent: int | None) -> ModelCall:
    """A call whose prompt's origins change every ten ids."""
    cuts = [*range(0, len(ids), 10), len(ids)]
    origins = tuple(
        OriginSpan(start=start, stop=stop, kind="data", message=start % 7) for start, stop in pairwise(cuts)
    )
    return ModelCall(
        call_id=f"c{number}",
        session_id="s",
        index=number,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="",
        parent_call_id=None if parent is None else f"c{parent}",
        status=CallStatus.INTENT,
        conversation=Conversation(messages=()),
        prompt=Prompt(ids=ids, origins=origins, template_digest="t"),
        weights_version=0,
        timing=CallTiming(received=0.0),
        request={"raw": True},
    )


def answered(asked: ModelCall, sampled: tuple[int, ...]) -> ModelCall:
    return msgspec.structs.replace(
        asked, status=CallStatus.COMPLETE, sampled_ids=sampled, finish_reason=FinishReason.STOP
    )


def without_bodies(asked: ModelCall) -> ModelCall:
    return msgspec.structs.replace(asked, request=None, response=None)


def test_a_thousand_calls_of_a_growing_conversation_hold_what_is_new() -> None:
    known = KnownCalls()
    prompt: tuple[int, ...] = tuple(range(50))
    last = call(0, prompt, None)
    for number in range(1000):
        asked = call(number, prompt, number - 1 if number else None)
        known.put(asked)
        last = answered(asked, tuple(range(1000 * number, 1000 * number + 20)))
        known.put(last)
        prompt += (*last.sampled_ids, *range(10))
    # 50 ids at first and 10 new ones a turn; of each answer nothing, because the call itself has it. The whole
    # prompts that are kept on top are bounded by their number.
    assert known.ids_held <= 50 + 10 * 999 + KnownCalls.WHOLE * (50 + 30 * 999)
    whole = sum(50 + 30 * number for number in range(1000))
    assert known.ids_held < whole / 100
    assert known["c999"] == without_bodies(last)


def test_whole_prompts_in_memory_would_be_noticed() -> None:
    class Whole(KnownCalls):
        WHOLE = 10**9

    known, prompt = Whole(), tuple(range(50))
    for number in range(200):
        known.put(call(number, prompt, number - 1 if number else None))
        prompt += tuple(range(30))
    assert known.ids_held > sum(50 + 30 * number for number in range(200))


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_comes_back_whatever_it_shares(seed: int) -> None:
    """Trees of calls with branches, cuts, unrelated roots, unfinished answers and images."""
    rng = random.Random(seed)
    known, truth = KnownCalls(), dict[str, ModelCall]()
    for number in range(60):
        parent = rng.choice([None, *range(number)]) if number else None
        ids: tuple[int, ...] = tuple(rng.randrange(5) for _ in range(rng.randrange(1, 40)))
        if parent is not None:
            base = truth[f"c{parent}"]
            whole = (*base.prompt.ids, *base.sampled_ids)
            ids = (*whole[: rng.randrange(len(whole) + 1)], *ids)
        asked = call(number, ids, parent)
        if rng.random() < 0.3:
            image = PlacedImage(sha256=str(rng.randrange(3)), start=0, count=1, grid=(1, 1, 1))
            asked = msgspec.structs.replace(asked, prompt=msgspec.structs.replace(asked.prompt, images=(image,)))
        known.put(asked)
        truth[asked.call_id] = without_bodies(asked)
        if rng.random() < 0.8:
            done = answered(asked, tuple(rng.randrange(5) for _ in range(rng.randrange(8))))
            known.put(done)
            truth[asked.call_id] = without_bodies(done)
        for name in rng.sample(sorted(truth), min(3, len(truth))):
            assert known[name] == truth[name]
    assert dict(known) == truth
    assert [light.call_id for light in known.light] == list(truth)
    assert all(light.prompt.ids == () for light in known.light)


def test_a_forgotten_call_is_gone_and_what_others_share_with_it_stays() -> None:
    known = KnownCalls()
    first, second = call(0, (1, 2, 3), None), call(1, (1, 2, 3, 4), None)
    known.put(first)
    known.put(second)
    known.forget("c0")
    assert "c0" not in known and known.lightly("c0") is None
    for number in range(2, 8):
        known.put(call(number, (9, number), None))
    assert known["c1"] == without_bodies(second)
