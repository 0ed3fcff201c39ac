"""Recorded log-probs are those of an uncached, unbatched plain forward, whatever happens around a call.

The scene: 16 sessions in 4 groups, three turns each at temperature 1, all behind one prefix; some calls are
cancelled midway and continued from what they had; the weights change while calls are in flight. Then each planted
fault (two ids swapped, a span off by one, keys of the old weights reused) must be caught by the same check.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Hashable
from pathlib import Path

import pytest
import torch
import transformers

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_batching import Batcher
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import EngineError

from .rescoring import Record, call, numbers, plain_model, tiny, worst_difference

SESSIONS, GROUP, TURNS = 16, 4, 3
TOLERANCE = 1e-4


class StaleBatcher(Batcher):
    """The planted fault: keys are found again whatever weights computed them."""

    def scope(self) -> Hashable:
        return "any weights"


class StaleEngine(TorchEngine):
    batcher_type = StaleBatcher


async def play(engine: TorchEngine, new_weights: Path) -> list[Record]:
    """The scene; every call that sampled something."""
    shared = numbers(0, 120)
    records: list[Record] = []
    midway, loaded = asyncio.Event(), asyncio.Event()
    in_second_turn: set[int] = set()

    def begun(record: Record) -> None:
        if len(record.ids) >= 4:
            in_second_turn.add(id(record))
        if len(in_second_turn) == SESSIONS // 2:
            midway.set()

    async def session(index: int) -> None:
        prompt = shared + numbers(100 + index // GROUP, 40)
        for turn in range(TURNS):
            cut = 7 if turn == 1 and index % 5 == 3 else None
            if turn == 2:
                await loaded.wait()
            record = await call(
                engine, prompt, stop_after=cut, watch=begun if turn == 1 else None, max_tokens=16 + index % 3
            )
            records.append(record)
            prompt = prompt + record.ids + numbers(200 + index * TURNS + turn, 11 + index % 4)

    async def weights() -> None:
        await midway.wait()
        await engine.load(new_weights, 2)
        loaded.set()

    await asyncio.gather(weights(), *(session(index) for index in range(SESSIONS)))
    return records


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {1: tiny(folder, 0), 2: tiny(folder, 1)}


async def recorded(models: dict[int, Path], engine_type: type[TorchEngine] = TorchEngine) -> list[Record]:
    options = EngineOptions(max_batch_tokens=96)
    engine = engine_type(models[1], threads=1, options=options, stop_ids=(), weights_version=1)
    try:
        records = await play(engine, models[2])
        stats = engine.stats
    finally:
        await engine.close()
    # The prefix was computed once per weights and shared; calls straddled the change of weights.
    assert stats.prefill_reused > 2 * stats.prefill_computed
    assert any(set(record.versions) == {1, 2} for record in records)
    assert {version for record in records for version in record.versions} == {1, 2}
    return records


async def test_sixteen_sessions_agree_with_a_plain_forward(models: dict[int, Path]) -> None:
    records = await recorded(models)
    assert sum(len(record.ids) for record in records) > SESSIONS * TURNS * 13
    plain = {version: plain_model(path) for version, path in models.items()}
    assert worst_difference(records, plain) < TOLERANCE

    swapped = copy.deepcopy(records[5])
    at = next(index for index in range(len(swapped.ids)) if swapped.ids[index] != swapped.ids[index + 1])
    swapped.ids[at], swapped.ids[at + 1] = swapped.ids[at + 1], swapped.ids[at]
    assert worst_difference([swapped], plain) > 100 * TOLERANCE

    shifted = copy.deepcopy(records[6])
    shifted.prompt, shifted.ids = [*shifted.prompt, shifted.ids[0]], [*shifted.ids[1:], shifted.ids[0]]
    assert worst_difference([shifted], plain) > 100 * TOLERANCE


async def test_stale_keys_are_caught(models: dict[int, Path]) -> None:
    records = await recorded(models, StaleEngine)
    plain = {version: plain_model(path) for version, path in models.items()}
    assert worst_difference([record for record in records if set(record.versions) == {1}], plain) < TOLERANCE
    assert worst_difference(records, plain) > 100 * TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
async def test_log_probs_are_of_the_divided_logits(models: dict[int, Path], temperature: float) -> None:
    engine = TorchEngine(models[1], threads=1, stop_ids=())
    record = await call(engine, numbers(1, 30), temperature=temperature, top_p=0.9, max_tokens=12)
    await engine.close()
    assert worst_difference([record], {0: plain_model(models[1])}) < TOLERANCE


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma", "Olmo2", "Phi3", "Granite", "Qwen3Moe"])
async def test_other_architectures(kind: str) -> None:
    extra = {"head_dim": 16} if kind in ("Gemma", "Qwen3") else {}
    if kind == "Qwen3Moe":
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    plain = copy.deepcopy(model)
    engine = TorchEngine(model, threads=1, options=EngineOptions(max_batch_tokens=40), stop_ids=())
    prompts = [[id % 128 for id in numbers(0, 70) + numbers(index, 9)] for index in range(4)]
    records = await asyncio.gather(*(call(engine, prompt, max_tokens=10) for prompt in prompts))
    await engine.close()
    assert worst_difference(records, {0: plain}) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("Mistral", {"sliding_window": 64}, "needs sliding_window"),
        ("Gemma2", {"head_dim": 16}, "full attention only; this model has sliding_attention layers"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
    ],
)
def test_what_cannot_be_run_is_refused(kind: str, extra: dict[str, object], message: str) -> None:
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**SMALL, **extra}))
    with pytest.raises(EngineError, match=message):
        TorchEngine(model)
