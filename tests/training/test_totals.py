"""Every step of the RL loop accounts for every token that its attempts sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.errors import ExactnessError
from openforgerl.training.options import GrpoOptions
from openforgerl.types import Attempt, Rollout, Sample, SampleSet, Task, Totals

from .test_grpo import OPTIONS, Bandit, Run

MakeModel = Callable[..., Any]
ONE_STEP = msgspec.structs.replace(OPTIONS, steps=1)
TOKENS = 3 * OPTIONS.group_size
"""Sampled in one group."""


async def step(directory: Path, make_model: MakeModel, kind: type[Bandit], options: GrpoOptions = ONE_STEP) -> Totals:
    run = Run(directory, make_model, options)
    run.loop.source = run.bandit = run.loop.engine = kind(run.store)
    (report,) = await run()
    return report.totals


class Flat(Bandit):
    """All rewards of task t0 .. t2 are equal."""

    async def rollout(self, task: Task, group: str, index: int, step: int) -> tuple[Rollout, Attempt, Sequence[Sample]]:
        rollout, attempt, samples = await super().rollout(task, group, index, step)
        assert attempt.outcome is not None
        return (
            rollout,
            msgspec.structs.replace(attempt, outcome=msgspec.structs.replace(attempt.outcome, reward=0.5)),
            samples,
        )


class Losing(Bandit):
    """Hands out the rows of all rollouts but one."""

    async def rollout(self, task: Task, group: str, index: int, step: int) -> tuple[Rollout, Attempt, Sequence[Sample]]:
        rollout, attempt, samples = await super().rollout(task, group, index, step)
        return rollout, attempt, samples if index else ()


class Retried(Bandit):
    """One of three sampled tokens of every attempt was a retry's."""

    def sample(self, attempt: Attempt, group: str, ids: list[int]) -> Sample:
        whole = super().sample(attempt, group, ids)
        assert whole.logprobs is not None
        span = msgspec.structs.replace(whole.spans[0], stop=5)
        return msgspec.structs.replace(whole, ids=whole.ids[:5], spans=(span,), logprobs=whole.logprobs[:2])

    async def rollout(self, task: Task, group: str, index: int, step: int) -> tuple[Rollout, Attempt, Sequence[Sample]]:
        commit = self.store.commit

        class Store:
            def __getattr__(self, name: str) -> Any:
                return getattr(Store.whole, name)

            async def commit(self, attempt: Attempt, samples: SampleSet) -> None:
                totals = Totals(sampled=3, trained=2, dropped={"retry": 1})
                await commit(attempt, msgspec.structs.replace(samples, totals=totals))

        Store.whole = self.store  # type: ignore[attr-defined]
        real, self.store = self.store, Store()  # type: ignore[assignment]
        try:
            return await super().rollout(task, group, index, step)
        finally:
            self.store = real


async def test_what_trains(tmp_path: Path, make_model: MakeModel) -> None:
    assert await step(tmp_path, make_model, Bandit) == Totals(sampled=2 * TOKENS, trained=2 * TOKENS)


async def test_groups_without_variance(tmp_path: Path, make_model: MakeModel) -> None:
    expected = Totals(sampled=2 * TOKENS, trained=0, masked={"nothing_to_compare": 2 * TOKENS})
    assert await step(tmp_path, make_model, Flat) == expected


async def test_what_was_dropped_before_there_were_rows(tmp_path: Path, make_model: MakeModel) -> None:
    expected = Totals(sampled=2 * TOKENS, trained=4 * TOKENS // 3, dropped={"retry": 2 * TOKENS // 3})
    assert await step(tmp_path, make_model, Retried) == expected


async def test_a_lost_row_stops_the_run(tmp_path: Path, make_model: MakeModel) -> None:
    with pytest.raises(ExactnessError, match="does not add up"):
        await step(tmp_path, make_model, Losing)
