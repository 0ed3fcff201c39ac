"""Supervised fine-tuning: loss on trained spans only, a validation curve, and a run that can stop anywhere."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.training.checkpoints import (
    discard_after,
    list_checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
    verify_checkpoint,
)
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import Likelihood, StepMetrics
from openforgerl.training.options import SftOptions
from openforgerl.types import JsonValue, Sample


class ValidationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Validation after `step` optimizer steps."""

    step: int
    loss: float
    """Nats per trained token."""
    accuracy: float
    """Share of trained tokens that are the model's most likely one."""
    tokens: int


@dataclass(frozen=True, slots=True)
class SftResult:
    """How a run ended; both directories can be served as `torch:DIR`."""

    curve: tuple[ValidationPoint, ...]
    best: Path
    """Checkpoint with the lowest validation loss (the earliest of equals)."""
    last: Path


OnStep = Callable[[StepMetrics, ValidationPoint | None], None]
"""Called after every optimizer step; with a point when the step was validated. May raise to stop the run."""


def train_sft(
    learner: Learner,
    train: Sequence[Sample],
    validation: Sequence[Sample],
    options: SftOptions,
    *,
    directory: Path,
    companions: Path | None = None,
    on_step: OnStep | None = None,
    resume: bool = True,
) -> SftResult:
    """Train from the learner's weights, or go on from the latest checkpoint in `directory` when `resume`.

    An interrupted and resumed run ends in the same weights, bit by bit, as an uninterrupted one (same machine and
    thread count). `learner` is made with `options.learner`; `companions` as in `save_checkpoint`. Without `resume`,
    checkpoints that are there are removed. Raises InputError when there is nothing to train or validate on, or when
    the directory belongs to other data or options; TrainingError for a damaged checkpoint.
    """
    rows = sorted((sample for sample in train if sample.trained_tokens), key=lambda sample: sample.sample_id)
    if not rows:
        raise InputError("nothing to train: no sample has a trained token")
    learner.planned_steps = options.steps
    digest = _digest(rows, validation, options)
    curve: list[ValidationPoint] = []
    if resume and list_checkpoints(directory):
        curve = _resume(learner, directory, digest)
        done = curve[-1].step
    else:
        discard_after(directory, -1)
        done = 0
        curve.append(_validate(learner, validation, 0))
        _save(learner, directory, companions, curve, digest)
    objective = Likelihood(options.aggregation)
    for step in range(done + 1, options.steps + 1):
        batch = [rows[index] for index in batch_order(len(rows), options.batch_samples, options.seed, step)]
        metrics = learner.step(batch, objective)
        point = None
        if step % options.validate_every == 0 or step == options.steps:
            point = _validate(learner, validation, step)
            curve.append(point)
            _save(learner, directory, companions, curve, digest)
            prune(directory, options.keep_checkpoints, protect=[_best(curve)])
        if on_step is not None:
            on_step(metrics, point)
    found = list_checkpoints(directory)
    return SftResult(curve=tuple(curve), best=found[_best(curve)], last=found[curve[-1].step])


def batch_order(count: int, size: int, seed: int, step: int) -> list[int]:
    """Indices of 1-based step `step`: a pure function, so that a resumed run needs no sampler state.

    The stream is one random order of all samples after another; a step takes the next `size` (at most `count`).
    """
    size = min(size, count)
    places = range((step - 1) * size, step * size)
    orders = {epoch: _epoch(count, seed, epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]


def _epoch(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"sft:{seed}:{epoch}").sample(range(count), count)


def _validate(learner: Learner, validation: Sequence[Sample], step: int) -> ValidationPoint:
    result = learner.evaluate(validation)
    return ValidationPoint(step=step, loss=result.loss, accuracy=result.accuracy, tokens=result.tokens)


def _best(curve: Sequence[ValidationPoint]) -> int:
    return min(curve, key=lambda point: (point.loss, point.step)).step


def _save(
    learner: Learner, directory: Path, companions: Path | None, curve: Sequence[ValidationPoint], digest: str
) -> None:
    extra: dict[str, JsonValue] = {"curve": msgspec.to_builtins(list(curve)), "digest": digest}
    save_checkpoint(directory, curve[-1].step, learner, companions=companions, extra=extra)


def _resume(learner: Learner, directory: Path, digest: str) -> list[ValidationPoint]:
    latest = list(list_checkpoints(directory).values())[-1]
    if verify_checkpoint(latest).extra.get("digest") != digest:
        raise InputError(
            f"{directory} holds an SFT run on other data or options; use the same again, or another directory"
        )
    extra = load_checkpoint(latest, learner).extra
    return msgspec.convert(extra["curve"], list[ValidationPoint])


def _digest(train: Sequence[Sample], validation: Sequence[Sample], options: SftOptions) -> str:
    """Of everything that decides the result besides the first weights."""
    content = msgspec.json.encode([list(train), list(validation), options], order="deterministic")
    return hashlib.sha256(content).hexdigest()
