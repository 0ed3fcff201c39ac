"""The RL loop on a bandit: it learns, its control does not, and a stop at any point changes nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from openforgerl.errors import ExactnessError, InputError, TrainingError
from openforgerl.store import Database, RunStore
from openforgerl.training import grpo
from openforgerl.training.checkpoints import list_checkpoints
from openforgerl.training.grpo import GrpoLoop, StepReport, compare, shuffled, tasks_for_step
from openforgerl.training.learner import Learner
from openforgerl.training.options import GrpoOptions, LearnerOptions, LoraOptions, OptimizerOptions
from openforgerl.types import (
    Attempt,
    Failure,
    Origin,
    Rollout,
    Sample,
    SampleSet,
    Source,
    Span,
    Stage,
    Task,
    Totals,
    Verdict,
)

MakeModel = Callable[..., Any]
TASKS = [Task(name=f"t{n}", digest=f"{n:064d}", path="", instruction="") for n in range(5)]
OPTIONS = GrpoOptions(
    learner=LearnerOptions(optimizer=OptimizerOptions(lr=4e-3, warmup_steps=2), min_shared_tokens=2),
    steps=4,
    groups_per_step=2,
    group_size=6,
    seed=3,
)


class Bandit:
    """Engine and source in one: each rollout samples three ids after its task's prompt.

    Reward: the share of them in 10..29 (a third of the vocabulary). Finished attempts go to the run store at once
    and are handed out again when a step is collected a second time, as the orchestrator does.
    """

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.model: Any = None
        self.weights_version = -1
        self.paused = False
        self.sampled: list[str] = []
        self.loads: list[tuple[str, int]] = []
        self.drop: set[str] = set()

    async def pause(self) -> None:
        self.paused = True

    async def load(self, weights: Any, version: int) -> None:
        assert self.paused
        self.model = AutoModelForCausalLM.from_pretrained(weights).eval()
        self.loads.append((weights.name, version))
        self.weights_version = version

    async def resume(self) -> None:
        self.paused = False

    async def collect(
        self, tasks: Sequence[Task], *, group_size: int, weights_version: int, step: int
    ) -> AsyncIterator[Sequence[tuple[Rollout, Attempt, Sequence[Sample]]]]:
        assert weights_version == self.weights_version
        for task in reversed(tasks):  # completion order is not plan order
            if task.name in self.drop:
                continue
            group = f"s{step}-{task.name}"
            yield [await self.rollout(task, group, index, step) for index in reversed(range(group_size))]

    async def rollout(self, task: Task, group: str, index: int, step: int) -> tuple[Rollout, Attempt, Sequence[Sample]]:
        rollout = Rollout(
            rollout_id=f"{group}-{index}", run_id="run", task=task.name, task_digest=task.digest, harness="bandit",
            group_id=group, index=index, seed=0, purpose="train", step=step,
        )  # fmt: skip
        await self.store.plan([rollout])
        before = await self.store.attempts(rollout.rollout_id)
        for attempt in before:
            if attempt.outcome is not None:
                return rollout, attempt, (await self.store.samples([attempt.attempt_id]))[attempt.attempt_id].samples
        number = len(before) + 1
        attempt = Attempt(
            attempt_id=f"{rollout.rollout_id}-a{number}", rollout_id=rollout.rollout_id, number=number, started_at=0
        )
        await self.store.begin_attempt(attempt)
        sample = self.sample(attempt, group, [2, 3, 40 + int(task.name[1:])])
        reward = statistics.fmean(10 <= token < 30 for token in sample.ids[3:])
        attempt = msgspec.structs.replace(attempt, outcome=Verdict(reward=reward, passed=reward == 1))
        self.sampled.append(attempt.attempt_id)
        await self.store.commit(attempt, SampleSet(samples=(sample,), totals=Totals(sampled=3, trained=3)))
        return rollout, attempt, (sample,)

    def sample(self, attempt: Attempt, group: str, ids: list[int]) -> Sample:
        generator = torch.Generator().manual_seed(zlib.crc32(attempt.rollout_id.encode()))
        logprobs: list[float] = []
        for _ in range(3):
            with torch.no_grad():
                row = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            ids = [*ids, int(torch.multinomial(row.exp(), 1, generator=generator))]
            logprobs.append(float(row[ids[-1]]))
        return Sample(
            sample_id=f"{attempt.attempt_id}-0", attempt_id=attempt.attempt_id, rollout_id=attempt.rollout_id,
            group_id=group, ids=tuple(ids), logprobs=tuple(logprobs), source=Source.POLICY,
            spans=(
                Span(start=3, stop=6, call_id="c", offset=0, state="trained", weights_version=self.weights_version),
            ),
        )  # fmt: skip


class Run:
    """One process of the run: everything in memory is new, the directory stays."""

    def __init__(self, directory: Path, make_model: MakeModel, options: GrpoOptions = OPTIONS) -> None:
        directory.mkdir(exist_ok=True)
        self.database = Database.open(directory / "run.sqlite")
        self.store = RunStore(self.database)
        self.bandit = Bandit(self.store)
        self.learner = Learner(make_model(), options.learner)
        self.loop = GrpoLoop(
            learner=self.learner, source=self.bandit, engine=self.bandit, store=self.store, tasks=TASKS,
            options=options, directory=directory,
        )  # fmt: skip

    async def __call__(self) -> list[StepReport]:
        reports: list[StepReport] = []
        try:
            await self.store.put_run("run", "digest")
            await self.loop.run(reports.append)
        finally:
            await self.database.close()
        return reports


def final_weights(directory: Path) -> bytes:
    return (list(list_checkpoints(directory / "checkpoints" / "rl").values())[-1] / "model.safetensors").read_bytes()


async def test_a_run_records_every_step(tmp_path: Path, make_model: MakeModel) -> None:
    run = Run(tmp_path, make_model)
    reports = await run()
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert run.bandit.loads == [(f"step-00000{version}", version) for version in range(5)]
    assert len(run.bandit.sampled) == len(set(run.bandit.sampled)) == 4 * 2 * 6
    assert list(list_checkpoints(tmp_path / "checkpoints" / "rl")) == [3, 4]
    for report in reports:
        assert (report.groups, report.groups_dropped, report.rollouts) == (2, 0, 12)
        assert report.tokens_trained + report.tokens_skipped == 36
        assert report.staleness_max == 0
        (share,) = report.harnesses.values()  # one harness: its share is the whole
        assert (share.rollouts, share.reward_mean, share.passed) == (12, report.reward_mean, report.passed)
        for update in report.updates:
            assert update.logprob_difference_max is not None
            assert update.logprob_difference_max < 1e-5  # sampler and learner agree
            assert update.ratio_mean == pytest.approx(1, abs=1e-5)
    reader = Database.read_only(tmp_path / "run.sqlite")
    recorded = await RunStore(reader).steps("rl")
    await reader.close()
    assert [(record.step, record.weights_version, record.checkpoint) for record in recorded] == [
        (step, step, f"checkpoints/rl/step-00000{step}") for step in range(1, 5)
    ]
    trained = [attempt for record in recorded for attempt in record.attempt_ids]
    assert sorted(trained) == sorted(run.bandit.sampled)
    assert msgspec.convert(recorded[0].metrics, StepReport) == reports[0]


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["whole", "lora"])
@pytest.mark.parametrize("point", ["collect", "learn", "save", "record", "load", "after"])
@pytest.mark.parametrize("at", [1, 3])
async def test_a_stop_anywhere_changes_nothing(
    tmp_path: Path,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    at: int,
    lora: LoraOptions | None,
) -> None:
    options = msgspec.structs.replace(OPTIONS, learner=msgspec.structs.replace(OPTIONS.learner, lora=lora))
    await Run(tmp_path / "straight", make_model, options)()
    stopped = Run(tmp_path / "stopped", make_model, options)

    class Killed(Exception):
        pass

    def bomb(owner: Any, name: str, *, before: bool, count: int) -> None:
        original = getattr(owner, name)
        calls = 0

        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count and before:
                raise Killed
            result = original(*args, **kwargs)
            if calls == count:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, dying)

    match point:
        case "collect":  # in the second group: half of the step's attempts are finished
            bomb(stopped.bandit, "sample", before=True, count=12 * (at - 1) + 9)
        case "learn":
            bomb(stopped.learner, "step", before=False, count=at)
        case "save":
            bomb(grpo, "save_checkpoint", before=False, count=at + 1)
        case "record":
            bomb(stopped.store, "record_step", before=True, count=at)
        case "load":
            bomb(stopped.bandit, "load", before=True, count=at + 1)
        case _:
            bomb(stopped.bandit, "resume", before=True, count=at + 1)
    with pytest.raises(Killed):
        await stopped()
    resumed = Run(tmp_path / "stopped", make_model, options)
    reports = await resumed()
    unrecorded = point in ("collect", "learn", "save", "record")
    assert [report.step for report in reports] == list(range(at if unrecorded else at + 1, 5))
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "straight")
    both = stopped.bandit.sampled + resumed.bandit.sampled
    assert len(both) == len(set(both)) == 48  # no finished attempt was made anew


async def test_rewards_rise_and_shuffled_ones_teach_nothing(tmp_path: Path, make_model: MakeModel) -> None:
    learner = LearnerOptions(optimizer=OptimizerOptions(lr=1e-2, warmup_steps=2), min_shared_tokens=2)
    options = msgspec.structs.replace(OPTIONS, learner=learner, steps=14, groups_per_step=3)

    async def gain(directory: Path, shuffle: bool) -> tuple[float, float]:
        reports = await Run(directory, make_model, msgspec.structs.replace(options, shuffle_rewards=shuffle))()
        rewards = [report.reward_mean for report in reports]
        return statistics.fmean(rewards[:3]), statistics.fmean(rewards[-5:])

    first, last = await gain(tmp_path / "learn", shuffle=False)
    assert first < 0.5
    assert last > 0.8
    control_first, control_last = await gain(tmp_path / "control", shuffle=True)
    assert control_last < control_first + 0.25


async def test_updates_per_step_share_the_groups(tmp_path: Path, make_model: MakeModel) -> None:
    options = msgspec.structs.replace(OPTIONS, steps=1, groups_per_step=4, updates_per_step=2)
    (report,) = await Run(tmp_path, make_model, options)()
    assert len(report.updates) == 2
    assert sum(update.tokens_trained for update in report.updates) == report.tokens_trained
    drift = report.updates[1].logprob_difference_mean
    assert drift is not None
    assert drift > 1e-4  # the second update sees rollouts of the weights before the first


async def test_dropped_groups_are_counted_and_an_empty_step_stops(tmp_path: Path, make_model: MakeModel) -> None:
    options = msgspec.structs.replace(OPTIONS, steps=1)
    names = [task.name for task in tasks_for_step(TASKS, 2, options.seed, 1)]
    run = Run(tmp_path / "one", make_model, options)
    run.bandit.drop = {names[0]}
    (report,) = await run()
    assert (report.groups, report.groups_dropped, report.rollouts) == (1, 1, 6)
    none = Run(tmp_path / "none", make_model, options)
    none.bandit.drop = set(names)
    with pytest.raises(TrainingError, match="step 1: no group could be completed for"):
        await none()


async def test_a_damaged_recorded_checkpoint_stops_the_run(tmp_path: Path, make_model: MakeModel) -> None:
    await Run(tmp_path, make_model, msgspec.structs.replace(OPTIONS, steps=2))()
    path = tmp_path / "checkpoints" / "rl" / "step-000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TrainingError, match=r"model\.safetensors differs"):
        await Run(tmp_path, make_model)()


async def test_cancelling_waits_for_the_update(tmp_path: Path, make_model: MakeModel) -> None:
    run = Run(tmp_path, make_model)
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()
    original = run.learner.step

    def slow(*args: Any) -> Any:
        loop.call_soon_threadsafe(inside.set)
        result = original(*args)
        finished.append(result.update)
        return result

    finished: list[int] = []
    run.learner.step = slow  # pyright: ignore
    task = asyncio.ensure_future(run())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished == [1]


CHILD = """
import asyncio, runpy, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
tests = Path(sys.argv[1])
run = runpy.run_path(str(tests / "test_grpo.py"))["Run"]
model = runpy.run_path(str(tests / "conftest.py"))["tiny_qwen3"]
asyncio.run(run(Path(sys.argv[2]), model)())
"""


def test_kill_9_and_run_again_is_the_same_run(tmp_path: Path) -> None:
    """Real processes, killed at seeded moments after their first checkpoint write, until one finishes.

    The run without a kill is a process of the same kind: equal bits need the same number of threads.
    """
    tests = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", CHILD, tests, str(tmp_path / "straight")], check=True)
    rng = random.Random(7)
    directory = tmp_path / "killed"
    killed = 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", CHILD, tests, str(directory)])
        if killed < 2:
            place = directory / "checkpoints" / "rl"
            before = set(place.iterdir()) if place.exists() else set()
            while child.poll() is None and not (place.exists() and set(place.iterdir()) - before):
                time.sleep(0.01)
            time.sleep(rng.random() * 0.3)
            child.kill()
            killed += child.wait() == -signal.SIGKILL
        if child.wait() == 0:
            break
        assert child.returncode == -signal.SIGKILL
    assert killed
    assert final_weights(directory) == final_weights(tmp_path / "straight")

    async def recorded() -> list[str]:
        reader = Database.read_only(directory / "run.sqlite")
        steps = await RunStore(reader).steps("rl")
        await reader.close()
        assert [record.step for record in steps] == [1, 2, 3, 4]
        return [attempt for record in steps for attempt in record.attempt_ids]

    trained = asyncio.run(recorded())
    assert len(trained) == len(set(trained)) == 48


def member(
    group: str, index: int, reward: float | None, tokens: int = 2, **changes: Any
) -> tuple[Rollout, Attempt, list[Sample]]:
    name = f"{group}-{index}"
    rollout = Rollout(
        rollout_id=name, run_id="run", task="t", task_digest="", harness="h", group_id=group, index=index, seed=0,
        purpose="train", step=1,
    )  # fmt: skip
    failure = Failure(stage=Stage.RUN, kind="crash", origin=Origin.HARNESS, message="", retryable=True)
    outcome = failure if reward is None else Verdict(reward=reward, passed=reward >= 1)
    attempt = Attempt(attempt_id=f"{name}-a1", rollout_id=name, number=1, started_at=0, outcome=outcome)
    samples = [
        Sample(
            **{
                "sample_id": f"{name}-{number}", "attempt_id": attempt.attempt_id, "rollout_id": name,
                "group_id": group, "ids": (1, 2, 3), "logprobs": (-1.0,), "source": Source.POLICY,
                "spans": (Span(start=2, stop=3, call_id="c", offset=0, state="trained"),),
            } | changes
        )
        for number in range(tokens)
    ]  # fmt: skip
    return rollout, attempt, samples


def test_one_reward_per_rollout_goes_to_all_its_samples() -> None:
    groups = [
        [member("g1", 0, 0.0, tokens=3), member("g1", 1, 1.0), member("g1", 2, 0.5, tokens=0)],
        [member("g2", 0, 1.0), member("g2", 1, 1.0)],
    ]
    made = compare(groups, OPTIONS, 1)
    # g1: mean 0.5, deviation 0.5; the rollout without samples counts in both
    assert [sample.advantage for sample in made.shares[0]] == pytest.approx([-1, -1, -1, 1, 1], abs=1e-5)
    assert len(made.shares) == 1
    assert (made.degenerate, made.untrained, made.skipped_tokens) == (1, 1, 4)


def test_a_failure_never_gets_a_reward() -> None:
    with pytest.raises(ExactnessError, match="g1-1-a1 has no verdict"):
        compare([[member("g1", 0, 0.0), member("g1", 1, None)]], OPTIONS, 1)
    with pytest.raises(ExactnessError, match="is not the policy's own work"):
        compare([[member("g1", 0, 0.0), member("g1", 1, 1.0, source=Source.TEACHER)]], OPTIONS, 1)
    with pytest.raises(ExactnessError, match="does not belong to group g1"):
        compare([[member("g1", 0, 0.0), member("g2", 1, 1.0)]], OPTIONS, 1)


def test_shuffling_permutes_over_all_groups() -> None:
    rewards = [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0]]
    moved = shuffled(rewards, seed=1, step=2)
    assert [len(group) for group in moved] == [3, 2, 1]
    assert sorted(value for group in moved for value in group) == [0, 1, 2, 3, 4, 5]
    assert moved == shuffled(rewards, seed=1, step=2)
    assert len({tuple(map(tuple, shuffled(rewards, 1, step))) for step in range(20)}) > 15
    # every place is reached by every reward
    assert {shuffled(rewards, 1, step)[2][0] for step in range(200)} == {0, 1, 2, 3, 4, 5}


def test_task_order_is_a_pure_function_of_seed_and_step() -> None:
    def names(step: int, seed: int = 0, tasks: Sequence[Task] = TASKS) -> list[str]:
        return [task.name for task in tasks_for_step(tasks, 2, seed, step)]

    # 5 tasks, 2 a step: an epoch is 2 steps of 4 different tasks
    for epoch in range(10):
        assert len({*names(2 * epoch + 1), *names(2 * epoch + 2)}) == 4
    assert names(7) == names(7, tasks=TASKS[::-1])
    assert [names(step) for step in range(1, 9)] != [names(step, seed=1) for step in range(1, 9)]
    assert {name for step in range(1, 21) for name in names(step)} == {task.name for task in TASKS}
    with pytest.raises(InputError, match="groups_per_step is 6, but there are only 5 tasks"):
        tasks_for_step(TASKS, 6, 0, 1)
