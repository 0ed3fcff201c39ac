"""Scoring again finds the engine's log-probs with the weights that sampled, and finds other weights out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import InputError
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.learner import Learner
from openforgerl.training.options import LearnerOptions
from openforgerl.training.rescoring import Rescored, rescore
from openforgerl.types import Prompt, Sample, Sampling, Source, Span


async def sampled(engine: TorchEngine, number: int, temperature: float) -> Sample:
    """An answer of at most 12 ids in two spans: the first 4 trained, the rest masked."""
    prompt = (*range(40, 60), 60 + number)
    ids, logprobs = list(prompt), list[float]()
    sampling = Sampling(max_tokens=12, seed=number, temperature=temperature)
    async for chunk in engine.generate(Prompt(ids=prompt), sampling, affinity=f"s{number}"):
        assert chunk.logprobs is not None
        ids += chunk.ids
        logprobs += chunk.logprobs
    call = f"c{number}"
    start = len(prompt)
    spans = [Span(start=start, stop=start + 4, call_id=call, offset=0, state="trained")]
    spans.append(Span(start=start + 4, stop=len(ids), call_id=call, offset=4, state="masked", reason="stale"))
    return Sample(
        sample_id=f"s{number}",
        attempt_id=f"a{number}",
        rollout_id=f"r{number}",
        group_id="g",
        ids=tuple(ids),
        spans=tuple(spans),
        logprobs=tuple(logprobs),
        source=Source.POLICY,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples(model: Path) -> list[Sample]:
    """Three at temperature 1, three at 0.5."""

    async def collect() -> list[Sample]:
        engine = TorchEngine(model, threads=1)
        try:
            return [await sampled(engine, number, 1.0 if number < 3 else 0.5) for number in range(6)]
        finally:
            await engine.close()

    return asyncio.run(collect())


TEMPERATURES = {f"c{number}": 1.0 if number < 3 else 0.5 for number in range(6)}


def test_the_weights_that_sampled_agree_and_masked_tokens_count_too(model: Path, samples: list[Sample]) -> None:
    found = rescore(samples, temperatures=TEMPERATURES, weights={0: model})
    (version,) = found.versions
    assert version.tokens == sum(sample.span_tokens for sample in samples)
    assert 0 <= version.p50 <= version.p90 <= version.p99 <= version.max < 1e-4
    assert found.unscored == {}


def test_other_weights_another_temperature_and_a_changed_value_are_seen(
    model: Path, samples: list[Sample], tmp_path: Path
) -> None:
    other = rescore(samples, temperatures=TEMPERATURES, weights={0: write_tiny_model(tmp_path / "other", seed=1)})
    assert other.versions[0].mean > 0.1
    hot = rescore(samples, temperatures=dict.fromkeys(TEMPERATURES, 1.0), weights={0: model})
    assert hot.versions[0].max > 0.1 and hot.versions[0].worst in {"s3", "s4", "s5"}
    values = list(samples[4].logprobs or ())
    values[5] -= 2.0
    changed = [*samples[:4], msgspec.structs.replace(samples[4], logprobs=tuple(values)), samples[5]]
    found = rescore(changed, temperatures=TEMPERATURES, weights={0: model}).versions[0]
    assert found.worst == "s4" and found.max == pytest.approx(2.0, abs=1e-3)
    assert found.p50 < 1e-4


def test_each_version_is_scored_by_its_own_weights(model: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Tokens from place 4 on are said to be of version 7: scored by what is given as 7, or not at all."""
    split = [
        msgspec.structs.replace(
            sample, spans=(sample.spans[0], msgspec.structs.replace(sample.spans[1], weights_version=7))
        )
        for sample in samples
    ]
    both = rescore(split, temperatures=TEMPERATURES, weights={0: model, 7: write_tiny_model(tmp_path / "o", seed=1)})
    first, second = both.versions
    assert (first.weights_version, first.tokens, first.max < 1e-4) == (0, 4 * 6, True)
    assert (second.weights_version, second.max > 0.1) == (7, True)
    alone = rescore(split, temperatures=TEMPERATURES, weights={0: model})
    rest = sum(sample.span_tokens for sample in samples) - 4 * 6
    assert alone == Rescored(versions=alone.versions, unscored={"the weights of their version are not kept": rest})
    assert len(alone.versions) == 1


def test_what_has_no_log_probs_is_counted(model: Path, samples: list[Sample]) -> None:
    bare = msgspec.structs.replace(samples[0], logprobs=None)
    found = rescore([bare], temperatures=TEMPERATURES, weights={0: model})
    assert found == Rescored(versions=(), unscored={"no log-probs": bare.span_tokens})


def test_two_samples_of_one_id_are_refused(model: Path, samples: list[Sample]) -> None:
    with pytest.raises(InputError, match="the same id"):
        Learner(model, LearnerOptions()).logprobs([samples[0], samples[0]])
