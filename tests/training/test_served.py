"""The engine must serve what was trained: a planted difference stops training, with a message that says what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import TrainingError
from openforgerl.training.grpo import GrpoLoop
from openforgerl.training.learner import Learner
from openforgerl.training.options import GrpoOptions, LearnerOptions
from openforgerl.training.served import ServedProbe, check_difference, check_version

MakeModel = Callable[..., Any]


@pytest.fixture
async def served(make_model: MakeModel) -> AsyncIterator[tuple[Learner, TorchEngine]]:
    engine = TorchEngine(make_model(seed=1), stop_ids=(1,), weights_version=3)
    yield Learner(make_model(seed=1), LearnerOptions(temperature=0.7)), engine
    await engine.close()


async def test_the_same_weights_pass(served: tuple[Learner, TorchEngine]) -> None:
    learner, engine = served
    assert await ServedProbe(engine, learner).check(3) < 1e-5


async def test_one_weight_that_went_to_a_wrong_place_is_found(served: tuple[Learner, TorchEngine]) -> None:
    learner, engine = served
    weights = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    query, key = (f"model.layers.1.self_attn.{part}_norm.weight" for part in "qk")
    with torch.no_grad():
        weights[query] *= 1.5
        learner.model.state_dict()[key].fill_(2.0)  # the learner moves on, the engine does not follow
    with pytest.raises(TrainingError, match=r"version 3 differ.*nats apart"):
        await ServedProbe(engine, learner).check(3)
    await engine.load({name: tensor.clone() for name, tensor in learner.model.state_dict().items()}, 4)
    assert await ServedProbe(engine, learner).check(4) < 1e-5
    await engine.load(weights | {key: learner.model.state_dict()[key].clone()}, 5)
    with pytest.raises(TrainingError, match="version 5 differ"):
        await ServedProbe(engine, learner).check(5)


async def test_an_update_that_never_arrived_is_found_by_its_version(served: tuple[Learner, TorchEngine]) -> None:
    learner, engine = served
    with pytest.raises(TrainingError, match=r"version 3, but the trained ones are version 4.*same command resumes"):
        await ServedProbe(engine, learner).check(4)


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (3, 4), (4, 4)])
def test_versions(oldest: int, newest: int) -> None:
    check_version("row", 3, 3, 3)
    with pytest.raises(TrainingError, match="row was sampled by weights of version"):
        check_version("row", oldest, newest, 3)


@pytest.mark.parametrize("mean", [0.06, float("nan"), float("inf")])
def test_differences(mean: float) -> None:
    check_difference(0.05, 1.0, 1, limit=0.05)
    with pytest.raises(TrainingError, match=r"train\.served_difference"):
        check_difference(mean, 1.0, 1, limit=0.05)


async def test_the_loop_stops_when_the_engine_keeps_old_weights(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `GrpoLoop` publishes: pause, load, resume, look."""
    engine = TorchEngine(make_model(seed=1), stop_ids=(1,))
    learner = Learner(make_model(seed=1), LearnerOptions())
    loop: Any = GrpoLoop(
        learner=learner, source=None, engine=engine, store=None, tasks=[], options=GrpoOptions(), directory=tmp_path,
        probe=ServedProbe(engine, learner),
    )  # type: ignore[arg-type]  # fmt: skip
    try:
        checkpoint = loop._save(0)
        await loop._publish(checkpoint, 1)

        async def deaf(weights: object, version: int) -> None:
            engine._batcher.version = version

        with torch.no_grad():
            learner.model.state_dict()["model.norm.weight"] += 0.5
        monkeypatch.setattr(engine, "load", deaf)
        with pytest.raises(TrainingError, match="served and trained weights of version 2 differ"):
            await loop._publish(checkpoint, 2)
    finally:
        await engine.close()
