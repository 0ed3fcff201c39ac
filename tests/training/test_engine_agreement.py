"""The engine that samples and the learner that trains compute the same policy, before and after a weight load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.checkpoints import save_checkpoint
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy
from openforgerl.training.options import LearnerOptions, OptimizerOptions
from openforgerl.types import Prompt, Sample, Sampling, Source, Span


async def sampled(engine: TorchEngine, number: int, temperature: float) -> Sample:
    """One answer of at most 24 tokens to a prompt that shares 30 ids with every other."""
    prompt = (*range(40, 70), 70 + number % 3, 71)
    ids: list[int] = list(prompt)
    logprobs: list[float] = []
    sampling = Sampling(max_tokens=24, seed=number, temperature=temperature)
    async for chunk in engine.generate(Prompt(ids=prompt), sampling, affinity=f"s{number}"):
        assert chunk.logprobs is not None
        ids.extend(chunk.ids)
        logprobs.extend(chunk.logprobs)
    return Sample(
        sample_id=f"s{number}",
        attempt_id=f"a{number}",
        rollout_id=f"r{number}",
        group_id="g",
        ids=tuple(ids),
        spans=(Span(start=len(prompt), stop=len(ids), call_id="c", offset=0, state="trained"),),
        logprobs=tuple(logprobs),
        source=Source.POLICY,
        advantage=1.0 if number % 2 else -1.0,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_agree_across_a_weight_load(tmp_path: Path, temperature: float) -> None:
    model = write_tiny_model(tmp_path / "model")
    learner = Learner(
        model, LearnerOptions(temperature=temperature, optimizer=OptimizerOptions(lr=5e-3, warmup_steps=0))
    )
    engine = TorchEngine(model, threads=1)
    try:
        for version in (0, 1):
            batch = await asyncio.gather(*(sampled(engine, number, temperature) for number in range(8)))
            metrics = learner.step(batch, ClippedPolicy())
            assert metrics.tokens_trained > 50
            assert metrics.logprob_difference_max is not None
            assert metrics.logprob_difference_max < 1e-4
            assert metrics.tokens_computed < 0.7 * metrics.tokens_in_rows
            checkpoint = save_checkpoint(tmp_path / "checkpoints", version + 1, learner, companions=model)
            stale = learner.step(batch, ClippedPolicy()).logprob_difference_max
            assert stale is not None
            assert stale > 1e-2  # the comparison would notice weights that were not loaded
            if version == 0:
                await engine.pause()
                await engine.load(checkpoint, 1)
                await engine.resume()
                learner = Learner(checkpoint, learner.options)
    finally:
        await engine.close()
