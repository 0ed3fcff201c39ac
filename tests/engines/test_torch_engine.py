"""How the torch engine behaves: streaming, fairness, cancelling, deadlines, weights, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openforgerl.engines import torch_attention, torch_batching
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_attention import Step
from openforgerl.engines.torch_batching import Batcher
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.engines.torch_fused import FusedDecoder
from openforgerl.engines.torch_model import PackedModel
from openforgerl.engines.torch_sampling import Drawn, Draws
from openforgerl.engines.torch_sequence import Sequence as Generation
from openforgerl.errors import EngineError, EngineOverloaded, InputError
from openforgerl.protocols import InferenceEngine, WeightControl
from openforgerl.types import Chunk, FinishReason, PlacedImage, Prompt, Sampling

from .rescoring import call, numbers, plain_model, tiny, worst_difference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("engine"))


@asynccontextmanager
async def opened(
    model: Path, engine_type: type[TorchEngine] = TorchEngine, **options: Any
) -> AsyncIterator[TorchEngine]:
    engine = engine_type(model, threads=1, options=EngineOptions(**options), stop_ids=())
    try:
        yield engine
    finally:
        await engine.close()


async def first(engine: TorchEngine, prompt: Sequence[int], **sampling: Any) -> tuple[Chunk, AsyncIterator[Chunk]]:
    """The first chunk of a call, and the rest of it."""
    stream = engine.generate(Prompt(ids=tuple(prompt)), Sampling(**sampling), affinity="s")
    return await anext(stream), stream


async def test_keeps_its_promises_as_types(model: Path) -> None:
    async with opened(model, context_length=700) as engine:
        assert isinstance(engine, InferenceEngine)
        assert isinstance(engine, WeightControl)
        assert (engine.model_name, engine.context_length, engine.weights_version) == ("tiny-0", 700, 0)


async def test_streams_while_it_samples(model: Path) -> None:
    async with opened(model) as engine:
        chunk, rest = await first(engine, numbers(0, 20), max_tokens=300)
        assert engine.stats.decoded < 300
        total = len(chunk.ids) + sum([len(later.ids) async for later in rest])
        assert (total, engine.stats.decoded) == (300, 300)


async def test_ends_at_a_stop_id_which_is_the_last_id(model: Path) -> None:
    prompt = numbers(0, 20)
    async with opened(model) as engine:
        free = await call(engine, prompt, seed=5, max_tokens=30)
    stop = free.ids[11]
    engine = TorchEngine(model, threads=1, stop_ids=(stop,))
    stopped = await call(engine, prompt, seed=5, max_tokens=30)
    await engine.close()
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert (free.finish, stopped.finish) == (FinishReason.LENGTH, FinishReason.STOP)


async def test_stop_ids_come_from_the_generation_config(model: Path) -> None:
    assert PackedModel(plain_model(model)).stop_ids() == (2, 0)


async def test_the_context_bounds_an_answer(model: Path) -> None:
    async with opened(model, context_length=50) as engine:
        assert len((await call(engine, numbers(0, 46))).ids) == 4
        with pytest.raises(EngineError, match="50 prompt tokens leave no room in a context of 50"):
            await call(engine, numbers(0, 50))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(ids=()), "empty prompt"),
        (Prompt(ids=(1, 511)), "prompt ids must be 0 to 510"),
        (Prompt(ids=(-1,)), "prompt ids must be 0 to 510"),
        (Prompt(ids=(1,), images=(PlacedImage(sha256="0", start=0, count=1, grid=(1, 1, 1)),)), "no images"),
    ],
)
async def test_bad_prompts_are_refused_alone(model: Path, prompt: Prompt, message: str) -> None:
    async with opened(model) as engine:
        with pytest.raises(EngineError, match=message) as caught:
            await anext(engine.generate(prompt, Sampling(), affinity="s"))
        assert caught.value.status == 400
        assert len((await call(engine, [5, 6], max_tokens=3)).ids) == 3


async def test_seeds_give_the_same_answer_in_any_company(model: Path) -> None:
    prompt = numbers(0, 40)
    async with opened(model) as engine:
        alone = await call(engine, prompt, seed=11, max_tokens=30)
        company = [
            call(engine, numbers(index % 3, 25 + index), max_tokens=10 + 3 * index, temperature=0.5 + index / 8)
            for index in range(12)
        ]
        again, other, *_ = await asyncio.gather(
            call(engine, prompt, seed=11, max_tokens=30), call(engine, prompt, seed=12, max_tokens=30), *company
        )
    assert again.ids == alone.ids
    assert again.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert other.ids != alone.ids


async def test_a_group_computes_its_prompt_once(model: Path) -> None:
    prompt = numbers(0, 300)
    async with opened(model, max_batch_tokens=64) as engine:
        await asyncio.gather(*(call(engine, prompt, max_tokens=5) for _ in range(8)))
        # the first computes all, the other seven only the last id, whose logits they need
        assert (engine.stats.prefill_computed, engine.stats.prefill_reused) == (300 + 7, 7 * 299)
        turn = await call(engine, prompt, max_tokens=20)
        before = engine.stats.prefill_computed
        await call(engine, [*turn.prompt, *turn.ids, *numbers(1, 10)], max_tokens=2)
        # the last sampled id never had its keys computed
        assert engine.stats.prefill_computed - before == 10 + 1


async def test_cancelling_frees_the_place(model: Path) -> None:
    async with opened(model, max_sequences=1) as engine:
        _, stream = await first(engine, numbers(0, 20), max_tokens=30000)
        waiting = asyncio.create_task(call(engine, numbers(1, 20), max_tokens=3))
        await asyncio.sleep(0.1)
        assert (waiting.done(), engine.stats.running, engine.stats.waiting) == (False, 1, 1)
        await stream.aclose()  # type: ignore[attr-defined]
        assert len((await asyncio.wait_for(waiting, 20)).ids) == 3
        assert (engine.stats.running, engine.stats.waiting) == (0, 0)


async def test_cancelling_a_waiting_call_and_while_paused(model: Path) -> None:
    async with opened(model, max_sequences=1) as engine:
        await engine.pause()
        calls = [asyncio.create_task(call(engine, numbers(index, 20), max_tokens=3)) for index in range(3)]
        await asyncio.sleep(0.05)
        calls[1].cancel()
        for _ in range(200):
            if engine.stats.waiting == 2:
                break
            await asyncio.sleep(0.02)
        assert (engine.stats.waiting, engine.stats.decoded) == (2, 0)
        await engine.resume()
        assert [len(record.ids) for record in await asyncio.gather(calls[0], calls[2])] == [3, 3]


async def test_deadlines(model: Path) -> None:
    async with opened(model) as engine:
        begun = time.time()
        prompt = Prompt(ids=tuple(numbers(0, 20)))
        stream = engine.generate(prompt, Sampling(max_tokens=30000), affinity="s", deadline=begun + 0.3)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish is FinishReason.ABORTED
        assert time.time() - begun < 10
        await engine.pause()  # an idle worker wakes for a deadline too
        late = engine.generate(prompt, Sampling(), affinity="s", deadline=time.time() + 0.2)
        assert [chunk.finish async for chunk in late] == [FinishReason.ABORTED]
        await engine.resume()


async def test_priority_goes_first(model: Path) -> None:
    finished: list[str] = []

    async def ask(engine: TorchEngine, name: str, priority: int) -> None:
        stream = engine.generate(Prompt(ids=(5, 6, 7)), Sampling(max_tokens=4), affinity=name, priority=priority)
        async for _ in stream:
            pass
        finished.append(name)

    async with opened(model, max_sequences=1) as engine:
        await engine.pause()
        asks = [ask(engine, "low", 0), ask(engine, "high", 5), ask(engine, "low too", 0)]
        tasks = [asyncio.create_task(one) for one in asks]
        await asyncio.sleep(0.05)
        await engine.resume()
        await asyncio.gather(*tasks)
    assert finished == ["high", "low", "low too"]


async def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    async with opened(model, max_waiting=2) as engine:
        await engine.pause()
        waiting = [asyncio.create_task(call(engine, [5, 6], max_tokens=2)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(EngineOverloaded) as caught:
            await call(engine, [5, 6])
        assert caught.value.retry_after > 0
        await engine.resume()
        await asyncio.gather(*waiting)


async def test_wrong_weights_change_nothing(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = [
        ({key: value for key, value in weights.items() if key != name}, f"1 missing .first: ..{name}"),
        ({**weights, "extra": weights[name]}, "1 unknown .first: ..extra"),
        ({**weights, name: weights[name][:-1]}, rf"{name} must have shape \(256, 128\), got \(255, 128\)"),
    ]
    async with opened(model) as engine:
        before = await call(engine, numbers(0, 20), seed=1, max_tokens=10)
        for given, message in wrong:
            with pytest.raises(InputError, match=message):
                await engine.load({key: value + 1 for key, value in given.items()}, 7)
        with pytest.raises(InputError, match="no weights in"):
            await engine.load(tmp_path, 7)
        assert engine.weights_version == 0
        after = await call(engine, numbers(0, 20), seed=1, max_tokens=10)
        assert after.ids == before.ids
        await engine.load(tiny(tmp_path, 1), 8)
        assert engine.weights_version == 8
        changed = await call(engine, numbers(0, 20), seed=1, max_tokens=10)
        assert set(changed.versions) == {8}
        assert changed.logprobs != pytest.approx(before.logprobs, abs=1e-2)


async def test_close_fails_what_is_in_flight_and_refuses_more(model: Path) -> None:
    async with opened(model) as engine:
        _, stream = await first(engine, numbers(0, 20), max_tokens=30000)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="closed"):
            await call(engine, [5, 6])
        with pytest.raises(EngineError, match="closed"):
            await engine.pause()


class FailingBatcher(Batcher):
    """A step with id 13 in it fails; a sequence that begins with 14 gets a log-prob that is no number."""

    def _run(self, plan: Step, sampled: Sequence[Generation]) -> list[Drawn]:
        if (plan.ids == 13).any():
            raise RuntimeError("kernel exploded")
        drawn = super()._run(plan, sampled)
        pairs = zip(drawn, sampled, strict=True)
        return [Drawn(one.id, float("nan"), None) if who.ids[0] == 14 else one for one, who in pairs]


class FailingEngine(TorchEngine):
    batcher_type = FailingBatcher


async def test_a_failing_step_fails_its_batch_only(model: Path) -> None:
    async with opened(model, FailingEngine, max_sequences=1) as engine:
        results = await asyncio.gather(
            call(engine, [13, 5], max_tokens=3),
            call(engine, [5, 6], top_k=1, max_tokens=3),
            call(engine, [14, 6], max_tokens=3),
            call(engine, [5, 7], top_k=1, max_tokens=3),
            return_exceptions=True,
        )
        assert isinstance(results[0], EngineError) and "kernel exploded" in str(results[0])
        assert isinstance(results[2], EngineError) and "no finite log-prob" in str(results[2])
        assert [len(results[at].ids) for at in (1, 3)] == [3, 3]  # type: ignore[union-attr]


async def test_a_sequence_without_numbers_leaves_its_batch_running(model: Path) -> None:
    async with opened(model, FailingEngine) as engine:
        results = await asyncio.gather(
            *(call(engine, [start, 6], top_k=1, max_tokens=30) for start in (15, 14, 16)), return_exceptions=True
        )
        assert [isinstance(result, EngineError) for result in results] == [False, True, False]
        assert worst_difference([results[0], results[2]], {0: plain_model(model)}) < 1e-4  # type: ignore[list-item]


async def test_little_memory_costs_reuse_not_answers(model: Path) -> None:
    """1 MiB holds 1,024 tokens of keys: prefixes are evicted, sequences wait for each other, all are right."""
    async with opened(model, kv_memory_mb=1, max_batch_tokens=128) as engine:
        prompts = [numbers(index, 400) for index in range(6)]
        records = await asyncio.gather(*(call(engine, prompt, max_tokens=12) for prompt in prompts * 2))
        assert engine.stats.cached <= 1024
    assert [len(record.ids) for record in records] == [12] * 12
    assert worst_difference(records[::4], {0: plain_model(model)}) < 1e-4


async def test_the_device_neutral_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "FLASH_KERNEL", None)
    shared = numbers(0, 100)
    async with opened(model, max_batch_tokens=48) as engine:
        calls = [call(engine, shared + numbers(index, 20 + index), max_tokens=10) for index in range(5)]
        records = await asyncio.gather(*calls)
    assert worst_difference(records, {0: plain_model(model)}) < 1e-4


async def test_long_answers_stay_exact(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that grows long becomes a segment, again and again; the next turn finds all of it."""
    monkeypatch.setattr(torch_batching, "_LONGEST_ROW", 60)
    async with opened(model) as engine:
        long, short = await asyncio.gather(
            call(engine, numbers(0, 90), max_tokens=150), call(engine, numbers(0, 80), max_tokens=131)
        )
        assert worst_difference([long, short], {0: plain_model(model)}) < 1e-4
        before = engine.stats.prefill_computed
        await call(engine, [*long.prompt, *long.ids, 5, 6], max_tokens=1)
        assert engine.stats.prefill_computed - before == 3


def test_the_fast_forward_pass_is_used_only_when_it_agrees(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PackedModel(plain_model(model)).fused
    right = FusedDecoder.forward

    def wrong(self: FusedDecoder, step: Step) -> torch.Tensor:
        return right(self, step).roll(1, -1)

    monkeypatch.setattr(FusedDecoder, "forward", wrong)
    assert not PackedModel(plain_model(model)).fused


def test_a_long_prompt_stalls_nobody(model: Path) -> None:
    """While 2,000 prompt tokens are computed in bounded steps, a decoding sequence gets a token in every step."""
    packed = PackedModel(plain_model(model))
    batcher = Batcher(packed, max_batch_tokens=100, max_sequences=4, kv_tokens=100_000)

    def generation(prompt: list[int]) -> Generation:
        draws = Draws(Sampling(), prompt, packed.vocabulary, torch.device("cpu"))
        return Generation(prompt, draws, most_tokens=1000, stop_ids=frozenset(), priority=0, deadline=None)

    short, long = generation(numbers(0, 10)), generation(numbers(1, 2000))
    batcher.submit(short)
    batcher.step()
    batcher.submit(long)
    steps = 0
    while len(long.ids) == 2000:
        assert next(sequence for sequence, _ in batcher.step()) is short
        steps += 1
    assert steps == -(-2000 // 99)
    assert len(short.ids) == 11 + steps
