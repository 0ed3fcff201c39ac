"""The RL loop. Read `GrpoLoop.run`: it is the whole algorithm.

Step `s` (from 1) collects groups with weights version `s - 1` and makes version `s`; with `max_staleness` n, its
rollouts start as soon as version `s - 1 - n` is served, beside the steps before it. Nothing counts until
`record_step` commits: a kill before it loses at most one optimizer update, whose rollouts are finished attempts
that the source hands out again; a kill after it finds the step recorded and goes on with the next.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from openforgerl.errors import ExactnessError, InputError, TrainingError
from openforgerl.protocols import GroupSource, WeightControl
from openforgerl.store import RunStore
from openforgerl.training.ahead import StepsAhead
from openforgerl.training.algorithms import group_advantages
from openforgerl.training.checkpoints import discard_after, load_checkpoint, prune, save_checkpoint
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy, StepMetrics
from openforgerl.training.options import GrpoOptions
from openforgerl.training.served import ServedProbe
from openforgerl.trajectory import batch_totals, mask_stale
from openforgerl.types import Attempt, Rollout, Sample, Source, Task, Totals, Verdict

P = ParamSpec("P")
T = TypeVar("T")
Member = tuple[Rollout, Attempt, Sequence[Sample]]
Group = Sequence[Member]


class HarnessShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one harness had of a step."""

    rollouts: int
    reward_mean: float
    passed: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the loop; stored as the step's metrics."""

    step: int
    reward_mean: float
    """Over all rollouts, as graded (not as shuffled)."""
    reward_std: float
    passed: float
    """Share of rollouts whose verdict passed."""
    rollouts: int
    groups: int
    groups_degenerate: int
    """All rewards equal: nothing to compare, skipped."""
    groups_dropped: int
    """Tasks for which the source gave no group (too many failures of ours)."""
    rollouts_untrained: int
    """Rollouts of compared groups without a trained token."""
    samples: int
    tokens_trained: int
    tokens_masked: int
    tokens_skipped: int
    """Trainable tokens of degenerate groups: their advantage is 0."""
    totals: Totals
    """The account of every sampled token of the step's attempts: trained, masked or dropped, with reasons."""
    rollouts_ahead: int = 0
    """Rollouts that began under older weights than those this step started from."""
    staleness_max: int
    """Most versions by which a trained span's weights are older than those this step started from."""
    harnesses: dict[str, HarnessShare] = {}
    """By name."""
    updates: tuple[StepMetrics, ...]
    seconds_collecting: float
    """Time in which nothing was trained because groups were waited for."""
    seconds_learning: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step's groups, compared: what to train on and what was left out."""

    shares: tuple[tuple[Sample, ...], ...]
    """Samples with their advantages, one tuple per compared group."""
    degenerate: int
    untrained: int
    skipped_tokens: int


@dataclass(slots=True)
class GrpoLoop:
    """The parts of a run. `directory` is the run folder; checkpoints go to `checkpoints/<stage>` in it."""

    learner: Learner
    source: GroupSource
    engine: WeightControl
    store: RunStore
    tasks: Sequence[Task]
    options: GrpoOptions
    directory: Path
    stage: str = "rl"
    companions: Path | None = None
    """Model directory whose tokenizer files go into every checkpoint."""
    probe: ServedProbe | None = None
    """Compares the engine's weights with the learner's after every update; None = not compared."""

    async def run(self, on_step: Callable[[StepReport], None] | None = None) -> Path:
        """Train to `options.steps`, from wherever the store says the run stands; the last checkpoint.

        `on_step` is called after each recorded step and may raise to stop. Raises TrainingError when a checkpoint
        is damaged, an update is not finite, the engine serves other weights or a whole step gave no group; run again to
        resume.
        """
        self.learner.planned_steps = self.options.steps * self.options.updates_per_step
        done, checkpoint = await self._resume()
        await self._publish(checkpoint, done)
        async with aclosing(StepsAhead(self._collect, self.options.max_staleness, self.options.steps)) as collecting:
            for step in range(done + 1, self.options.steps + 1):
                started = time.monotonic()
                groups = await collecting.of(step)
                collected = time.monotonic()
                comparison = compare(groups, self.options, step)
                updates = await _finish_in_thread(self._learn, comparison)
                checkpoint = await _finish_in_thread(self._save, step)
                seconds = (collected - started, time.monotonic() - collected)
                totals = await self._totals(groups, comparison, updates)
                report = _report(step, groups, comparison, updates, self.options, seconds, totals)
                await self.store.record_step(
                    self.stage,
                    step,
                    step,
                    str(checkpoint.relative_to(self.directory)),
                    msgspec.to_builtins(report),
                    [attempt.attempt_id for group in groups for _, attempt, _ in group],
                )
                await self._publish(checkpoint, step)
                prune(checkpoint.parent, self.options.keep_checkpoints)
                if on_step is not None:
                    on_step(report)
        return checkpoint

    async def _resume(self) -> tuple[int, Path]:
        """The latest recorded step and its checkpoint, loaded; what was never recorded is removed."""
        recorded = await self.store.steps(self.stage)
        root = self.directory / "checkpoints" / self.stage
        if not recorded:
            discard_after(root, -1)
            return 0, self._save(0)
        last = recorded[-1]
        discard_after(root, last.step)
        checkpoint = self.directory / last.checkpoint
        manifest = load_checkpoint(checkpoint, self.learner)
        if manifest.step != last.step:
            raise TrainingError(f"{checkpoint} is of step {manifest.step}, but the run recorded step {last.step}")
        return last.step, checkpoint

    async def _collect(self, step: int) -> list[Group]:
        """Complete groups of this step, in an order that does not depend on which finished first.

        None starts earlier than its staleness allows; what a source hands out that is staler nevertheless is masked.
        """
        tasks = tasks_for_step(self.tasks, self.options.groups_per_step, self.options.seed, step)
        groups: list[Group] = []
        async for group in self.source.collect(
            tasks, group_size=self.options.group_size, weights_version=step - 1, step=step
        ):
            fresh = [
                (rollout, attempt, mask_stale(samples, step - 1, self.options.max_staleness))
                for rollout, attempt, samples in group
            ]
            groups.append(sorted(fresh, key=lambda member: member[0].index))
        if not groups:
            raise TrainingError(
                f"step {step}: no group could be completed for {', '.join(task.name for task in tasks)}; "
                "see the attempts' failures, repair the cause and resume"
            )
        return sorted(groups, key=lambda group: group[0][0].group_id)

    def _learn(self, comparison: Comparison) -> list[StepMetrics]:
        """One update per share of the groups; none when no group could be compared."""
        objective = ClippedPolicy.of(self.options)
        parts = min(self.options.updates_per_step, len(comparison.shares))
        return [
            self.learner.step([sample for share in comparison.shares[part::parts] for sample in share], objective)
            for part in range(parts)
        ]

    async def _totals(self, groups: Sequence[Group], comparison: Comparison, updates: Sequence[StepMetrics]) -> Totals:
        """The step's account, asserted: ExactnessError when a sampled token is lost or counted twice."""
        recorded = await self.store.samples([attempt.attempt_id for group in groups for _, attempt, _ in group])
        return batch_totals(
            {attempt_id: found.totals for attempt_id, found in recorded.items()},
            [sample for group in groups for _, _, samples in group for sample in samples],
            trained=sum(update.tokens_trained for update in updates),
            skipped=comparison.skipped_tokens,
        )

    def _save(self, step: int) -> Path:
        root = self.directory / "checkpoints" / self.stage
        return save_checkpoint(root, step, self.learner, companions=self.companions)

    async def _publish(self, checkpoint: Path, version: int) -> None:
        """Make the engine sample with these weights, and see that it does; in-flight work waits meanwhile."""
        await self.engine.pause()
        try:
            await self.engine.load(checkpoint, version)
        finally:
            await self.engine.resume()
        if self.probe is not None:
            await self.probe.check(version)


def tasks_for_step(tasks: Sequence[Task], count: int, seed: int, step: int) -> list[Task]:
    """The tasks of 1-based step `step`: a pure function of the set of tasks, `count`, `seed` and `step`.

    Tasks are walked in epochs, each in a new random order, without repeats inside a step; the few left over at the
    end of an epoch (fewer than `count`) wait for another epoch. Raises InputError when there are not `count` tasks.
    """
    if count > len(tasks):
        raise InputError(f"groups_per_step is {count}, but there are only {len(tasks)} tasks")
    steps_per_epoch = len(tasks) // count
    epoch, place = divmod(step - 1, steps_per_epoch)
    names = sorted(tasks, key=lambda task: (task.name, task.digest))
    order = random.Random(f"grpo:{seed}:{epoch}").sample(names, len(names))
    return order[place * count : (place + 1) * count]


def compare(groups: Sequence[Group], options: GrpoOptions, step: int) -> Comparison:
    """Advantages of every group, one reward per rollout, given to all samples of the rollout.

    Under `shuffle_rewards` the step's rewards are permuted over all its rollouts first. How much each sample's
    tokens weigh is decided later, over the whole batch (`options.aggregation`). Raises ExactnessError when a member
    has no verdict, its samples are not the policy's, or an id does not match: such a group must never be built.
    """
    rewards = [[_reward(group, member) for member in group] for group in groups]
    if options.shuffle_rewards:
        rewards = shuffled(rewards, options.seed, step)
    shares: list[tuple[Sample, ...]] = []
    degenerate, untrained, skipped = 0, 0, 0
    for group, rewards_G in zip(groups, rewards, strict=True):
        advantages = group_advantages(rewards_G, normalise_std=options.normalise_std)
        if advantages.degenerate:
            degenerate += 1
            skipped += sum(sample.trained_tokens for _, _, samples in group for sample in samples)
            continue
        untrained += sum(1 for _, _, samples in group if not any(sample.trained_tokens for sample in samples))
        shares.append(
            tuple(
                msgspec.structs.replace(sample, advantage=advantage)
                for (_, _, samples), advantage in zip(group, advantages.values, strict=True)
                for sample in samples
            )
        )
    return Comparison(tuple(shares), degenerate, untrained, skipped)


def shuffled(rewards: Sequence[Sequence[float]], seed: int, step: int) -> list[list[float]]:
    """The same rewards, permuted over all places of all groups; a pure function of seed and step."""
    flat = [reward for group in rewards for reward in group]
    random.Random(f"shuffle:{seed}:{step}").shuffle(flat)
    places = iter(flat)
    return [[next(places) for _ in group] for group in rewards]


def _reward(group: Group, member: Member) -> float:
    rollout, attempt, samples = member
    if not isinstance(attempt.outcome, Verdict):
        raise ExactnessError(f"attempt {attempt.attempt_id} has no verdict, so it has no reward and cannot train")
    if rollout.group_id != group[0][0].group_id or attempt.rollout_id != rollout.rollout_id:
        raise ExactnessError(f"attempt {attempt.attempt_id} does not belong to group {group[0][0].group_id}")
    for sample in samples:
        if sample.source is not Source.POLICY or sample.rollout_id != rollout.rollout_id:
            raise ExactnessError(
                f"sample {sample.sample_id} ({sample.source}, of {sample.rollout_id}) is not the policy's own work in "
                f"rollout {rollout.rollout_id}"
            )
    return attempt.outcome.reward


def _report(
    step: int,
    groups: Sequence[Group],
    comparison: Comparison,
    updates: Sequence[StepMetrics],
    options: GrpoOptions,
    seconds: tuple[float, float],
    totals: Totals,
) -> StepReport:
    verdicts = [attempt.outcome for group in groups for _, attempt, _ in group if isinstance(attempt.outcome, Verdict)]
    rewards = [verdict.reward for verdict in verdicts]
    samples = [sample for group in groups for _, _, members in group for sample in members]
    return StepReport(
        step=step,
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
        passed=statistics.fmean(verdict.passed for verdict in verdicts),
        rollouts=len(verdicts),
        groups=len(groups),
        groups_degenerate=comparison.degenerate,
        groups_dropped=options.groups_per_step - len(groups),
        rollouts_untrained=comparison.untrained,
        samples=len(samples),
        tokens_trained=sum(update.tokens_trained for update in updates),
        tokens_masked=sum(sample.span_tokens - sample.trained_tokens for sample in samples),
        tokens_skipped=comparison.skipped_tokens,
        totals=totals,
        rollouts_ahead=sum(attempt.weights_version < step - 1 for group in groups for _, attempt, _ in group),
        staleness_max=max(
            (
                step - 1 - span.weights_version
                for share in comparison.shares
                for sample in share
                for span in sample.spans
                if span.state == "trained"
            ),
            default=0,
        ),
        harnesses=_by_harness(groups),
        updates=tuple(updates),
        seconds_collecting=seconds[0],
        seconds_learning=seconds[1],
    )


def _by_harness(groups: Sequence[Group]) -> dict[str, HarnessShare]:
    verdicts: dict[str, list[Verdict]] = {}
    for rollout, attempt, _ in (member for group in groups for member in group):
        if isinstance(attempt.outcome, Verdict):
            verdicts.setdefault(rollout.harness, []).append(attempt.outcome)
    return {
        name: HarnessShare(
            rollouts=len(found),
            reward_mean=statistics.fmean(verdict.reward for verdict in found),
            passed=statistics.fmean(verdict.passed for verdict in found),
        )
        for name, found in sorted(verdicts.items())
    }


async def _finish_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run beside the event loop, which may be serving agents. When cancelled, wait for the work before leaving:
    nothing may go on changing the learner behind our back."""
    future = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen, so that asyncio does not report it as forgotten; the cancellation goes first
        raise
