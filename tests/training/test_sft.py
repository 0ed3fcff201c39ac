"""SFT: what it trains on, its curve, and that stopping and resuming changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openforgerl.errors import InputError, Interrupted, TrainingError
from openforgerl.training.checkpoints import list_checkpoints
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import StepMetrics
from openforgerl.training.options import LearnerOptions, OptimizerOptions, SftOptions
from openforgerl.training.sft import SftResult, ValidationPoint, batch_order, train_sft
from openforgerl.types import Sample, Source

MakeSample = Callable[..., Sample]
MakeModel = Callable[..., Any]

OPTIONS = SftOptions(
    learner=LearnerOptions(
        optimizer=OptimizerOptions(kind="muon", lr=5e-3, decay="linear", warmup_steps=2), min_shared_tokens=2
    ),
    steps=11,
    batch_samples=4,
    validate_every=3,
    seed=1,
)


@pytest.fixture
def data(make_sample: MakeSample) -> tuple[list[Sample], list[Sample]]:
    """Rows `a b c … → answer a+1, b+1`: a small rule. Teacher samples without log-probs."""

    def row(number: int) -> Sample:
        a, b = 2 + number % 5, 10 + number % 7
        ids = [40, 41, a, b, 42, a + 20, b + 20, 1]
        return make_sample(f"t{number:02d}", ids, [(5, 8)], source=Source.TEACHER)

    return [row(number) for number in range(10)], [row(number) for number in (3, 17, 29)]


def train(make_model: MakeModel, data: tuple[list[Sample], list[Sample]], directory: Path, **more: Any) -> SftResult:
    learner = Learner(make_model(), OPTIONS.learner)
    return train_sft(learner, *data, OPTIONS, directory=directory, **more)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".safetensors", ".json")}


def test_it_learns_and_keeps_best_and_last(
    tmp_path: Path, make_model: MakeModel, data: tuple[list[Sample], list[Sample]]
) -> None:
    seen: list[tuple[StepMetrics, ValidationPoint | None]] = []
    result = train(make_model, data, tmp_path, on_step=lambda *step: seen.append(step))
    assert [point.step for point in result.curve] == [0, 3, 6, 9, 11]
    assert result.curve[-1].loss < 0.7 * result.curve[0].loss
    # warmup over 2 steps, then constant to half of the 11, then linear down to 0.05 of 5e-3
    assert [seen[index][0].learning_rate for index in (0, 1, 10)] == pytest.approx([2.5e-3, 5e-3, 2.5e-4])
    assert all(point.tokens == 9 for point in result.curve)
    assert [metrics.update for metrics, _ in seen] == list(range(1, 12))
    assert [point.step for _, point in seen if point is not None] == [3, 6, 9, 11]
    best = min(result.curve, key=lambda point: point.loss)
    assert result.best == tmp_path / f"step-{best.step:06d}"
    assert result.last == tmp_path / "step-000011"
    assert set(list_checkpoints(tmp_path)) == {9, 11, best.step}


@pytest.mark.parametrize("stop_at", [1, 2, 3, 5, 6, 9, 10, 11])
def test_stopped_and_resumed_is_the_same_run(
    tmp_path: Path, make_model: MakeModel, data: tuple[list[Sample], list[Sample]], stop_at: int
) -> None:
    straight = train(make_model, data, tmp_path / "straight")

    def stop(metrics: StepMetrics, point: ValidationPoint | None) -> None:
        if metrics.update == stop_at:
            raise Interrupted("stop")

    with pytest.raises(Interrupted):
        train(make_model, data, tmp_path / "stopped", on_step=stop)
    steps: list[int] = []
    resumed = train(make_model, data, tmp_path / "stopped", on_step=lambda metrics, _: steps.append(metrics.update))
    assert steps == list(range(stop_at - stop_at % 3 + 1 if stop_at < 11 else 12, 12))
    assert resumed.curve == straight.curve
    assert files(resumed.last) == files(straight.last)  # weights and manifest, optimizer digest included: bit by bit
    assert files(resumed.best) == files(straight.best)


def test_without_resume_it_starts_over(
    tmp_path: Path, make_model: MakeModel, data: tuple[list[Sample], list[Sample]]
) -> None:
    first = train(make_model, data, tmp_path)
    steps: list[int] = []
    train(make_model, data, tmp_path, resume=False, on_step=lambda metrics, _: steps.append(metrics.update))
    assert steps == list(range(1, 12))
    again: list[int] = []
    done = train(make_model, data, tmp_path, on_step=lambda metrics, _: again.append(metrics.update))
    assert again == []
    assert done.curve == first.curve


def test_other_data_is_not_resumed(
    tmp_path: Path, make_model: MakeModel, data: tuple[list[Sample], list[Sample]]
) -> None:
    train(make_model, data, tmp_path)
    with pytest.raises(InputError, match="other data or options"):
        train(make_model, (data[0][:-1], data[1]), tmp_path)


def test_a_damaged_checkpoint_stops_the_run(
    tmp_path: Path, make_model: MakeModel, data: tuple[list[Sample], list[Sample]]
) -> None:
    last = train(make_model, data, tmp_path).last / "learner.pt"
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"learner\.pt differs"):
        train(make_model, data, tmp_path)


def test_only_trained_spans_have_loss(tmp_path: Path, make_model: MakeModel, make_sample: MakeSample) -> None:
    """Rows that differ in masked ids after the trained one give the same weights."""

    def weights(tail: int, directory: Path) -> dict[str, torch.Tensor]:
        rows = [make_sample("a", [2, 3, 4, tail], [(2, 3)], masked=[(3, 4)])]
        options = SftOptions(learner=OPTIONS.learner, steps=2, batch_samples=1, validate_every=2)
        learner = Learner(make_model(), options.learner)
        train_sft(learner, rows, rows, options, directory=directory)
        return learner.model.state_dict()

    left, right = weights(5, tmp_path / "l"), weights(50, tmp_path / "r")
    # the embedding gradient of a masked, last id is zero too
    assert all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)
    assert not torch.equal(left["lm_head.weight"], make_model().state_dict()["lm_head.weight"])


def test_nothing_to_train_is_an_error(tmp_path: Path, make_model: MakeModel, make_sample: MakeSample) -> None:
    with pytest.raises(InputError, match="nothing to train"):
        train(make_model, ([make_sample("a", [2, 3], [])], []), tmp_path)


def test_batches_walk_all_samples_in_epochs() -> None:
    # 7 samples in batches of 3: the first 7 places are one epoch, the next 7 another
    flat = [index for step in range(1, 15) for index in batch_order(7, 3, seed=0, step=step)]
    for epoch in range(6):
        assert sorted(flat[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert batch_order(7, 3, seed=0, step=5) == flat[12:15]
    assert batch_order(7, 3, seed=1, step=1) != flat[:3]
    assert Counter(batch_order(2, 50, seed=0, step=4)) == {0: 1, 1: 1}
