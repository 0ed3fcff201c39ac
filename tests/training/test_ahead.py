"""Rollouts that run ahead of training: how far, what they were sampled by, and that a stop loses none of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from openforgerl.config import choose_tasks, load_config
from openforgerl.errors import ConfigError
from openforgerl.orchestrator.assembly import open_run, read_run
from openforgerl.rendering import load_renderer
from openforgerl.store import RunStore
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.ahead import StepsAhead
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.grpo import StepReport
from openforgerl.training.reinforcing import Watch, reinforce
from openforgerl.types import Attempt, Rollout, Verdict

SETTINGS = {
    "harness.name": "react",
    "harness.react.max_turns": 2,
    "harness.react.max_bad_turns": 2,
    "rollout.max_output_tokens": 24,
    "run.concurrency": 3,  # the first of step 2 begins beside the whole last one of step 1's four
    "train.groups_per_step": 2,
    "train.group_size": 2,
    "engine.context_length": 4096,
}


class Sources:
    """Collects nothing, and tells when."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ending: list[int] = []
        self.ended: dict[int, int] = {}
        """Step → how many were ending when it had ended."""
        self.ends: dict[int, asyncio.Future[str]] = {}

    async def collect(self, step: int) -> str:
        self.begun.append(step)
        self.ends[step] = asyncio.get_running_loop().create_future()
        try:
            return await self.ends[step]
        finally:
            self.ending.append(step)
            await asyncio.sleep(0.05)
            self.ended[step] = len(self.ending)


@pytest.mark.parametrize(
    ("limit", "begun"),
    [
        (0, [[1], [2], [3], [4]]),
        (1, [[1, 2], [3], [4], []]),
        (2, [[1, 2, 3], [4], [], []]),
        (9, [[1, 2, 3, 4], [], [], []]),
    ],
)
async def test_a_step_begins_when_the_weights_are_served_that_it_may_be_sampled_by(
    limit: int, begun: list[list[int]]
) -> None:
    source, seen = Sources(), list[list[int]]()
    ahead = StepsAhead(source.collect, limit, last=4)
    for step in range(1, 5):  # version step - 1 is served now
        before = len(source.begun)
        asking = asyncio.create_task(ahead.of(step))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append(source.begun[before:])
        source.ends[step].set_result(f"groups of {step}")
        assert await asking == f"groups of {step}"
    assert seen == begun


async def test_a_failure_is_raised_at_its_own_step_and_a_stop_ends_all_steps_at_once() -> None:
    source = Sources()
    ahead = StepsAhead(source.collect, 3, last=4)
    asking = asyncio.create_task(ahead.of(1))
    await asyncio.sleep(0.01)
    source.ends[2].set_exception(ConfigError("broken"))
    source.ends[1].set_result("groups")
    assert await asking == "groups"
    with pytest.raises(ConfigError, match="broken"):
        await ahead.of(2)
    await ahead.aclose()
    assert sorted(source.ended) == [1, 2, 3, 4]
    assert source.ended[3] == source.ended[4] == 4  # each takes its time to end, and all take it together


def test_verl_has_an_option_of_its_own() -> None:
    settings = ("train.max_staleness=1", "trainer=verl")
    with pytest.raises(ConfigError, match="with veRL, rollouts run ahead by veRL's own options"):
        load_config(GrpoConfig, None, settings)


class Stopped(Exception):
    """A person who has seen enough."""


class Trained:
    """One process of a run with a real model, real sandboxes and rewards by chance, and when everything happened."""

    def __init__(self, folder: Path, model: Path, tasks: Path, **train: int) -> None:
        chosen = SETTINGS | {f"train.{name}": value for name, value in train.items()}
        chosen |= {"engine.kind": "torch", "engine.path": model, "tasks.path": tasks}
        self.folder = folder
        self.config = load_config(GrpoConfig, None, tuple(f"{name}={value}" for name, value in chosen.items()))
        self.model = model
        self.reports: dict[int, StepReport] = {}
        self.trained_at: dict[int, float] = {}

    async def run(self, stop_after: int | None = None) -> None:
        def attempt(rollout: Rollout, attempt: Attempt) -> None:
            assert isinstance(attempt.outcome, Verdict), attempt.outcome  # no call failed for a weight update

        def step(report: StepReport) -> None:
            self.reports[report.step] = report
            self.trained_at[report.step] = time.time()
            if report.step == stop_after:
                raise Stopped

        async with open_run(self.folder, self.config) as opened:
            await reinforce(
                opened,
                self.config,
                self.config.run,
                self.config.train,
                start=self.model,
                tasks=choose_tasks(self.config),
                renderer=load_renderer(self.model),
                watch=Watch(attempt, step),
            )

    async def attempts(self) -> list[tuple[Rollout, Attempt]]:
        database = read_run(self.folder)
        try:
            store = RunStore(database)
            rollouts = {rollout.rollout_id: rollout for rollout in await store.rollouts()}
            return [(rollouts[attempt.rollout_id], attempt) for attempt in await store.attempts()]
        finally:
            await database.close()

    async def versions(self) -> Counter[tuple[int, int]]:
        """(step, version) → trained tokens of the step that weights of this version sampled."""
        database = read_run(self.folder)
        try:
            store, found = RunStore(database), Counter[tuple[int, int]]()
            steps = {attempt.attempt_id: rollout.step for rollout, attempt in await self.attempts()}
            for attempt_id, made in (await store.samples(list(steps))).items():
                for span in (span for sample in made.samples for span in sample.spans):
                    if span.state == "trained":
                        found[steps[attempt_id], span.weights_version] += span.stop - span.start
            return found
        finally:
            await database.close()


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Trained]:
    """Runs on two tasks whose rewards are drawn by lot, so that groups can be compared."""
    model = write_tiny_model(tmp_path / "tiny")
    for name in ("a", "b"):
        task = tmp_path / "tasks" / name
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /workspace\n")
        (task / "instruction.md").write_text("Say something.")
        (task / "task.toml").write_text(f'schema_version = "1.4"\n[task]\nname = "lot/{name}"\n')
        (task / "tests" / "test.sh").write_text(
            "#!/bin/bash\nmkdir -p /logs/verifier\necho 0.$((RANDOM + 10000)) > /logs/verifier/reward.txt\n"
        )
    return lambda name, **train: Trained(tmp_path / name, model, tmp_path / "tasks", **train)


async def test_without_a_limit_given_no_rollout_begins_before_its_step(made: Callable[..., Trained]) -> None:
    run = made("run", steps=2)
    await run.run()
    attempts = await run.attempts()
    assert len(attempts) == 8
    for rollout, attempt in attempts:
        assert attempt.weights_version == rollout.step - 1
        assert rollout.step == 1 or attempt.started_at > run.trained_at[rollout.step - 1]
    assert set(await run.versions()) == {(1, 0), (2, 1)}
    assert [report.rollouts_ahead for report in run.reports.values()] == [0, 0]


async def test_with_a_limit_of_one_rollouts_overlap_with_training_and_a_stop_loses_none(
    made: Callable[..., Trained],
) -> None:
    run = made("run", steps=4, max_staleness=1)
    with pytest.raises(Stopped):
        await run.run(stop_after=2)
    before = {attempt.attempt_id: attempt for _, attempt in await run.attempts()}
    assert {rollout.step for rollout, _ in await run.attempts()} >= {1, 2, 3}  # step 3 was under way beside step 2
    first = run.trained_at.copy()
    resumed = made("run", steps=4, max_staleness=1)
    await resumed.run()
    assert list(run.reports) == [1, 2] and list(resumed.reports) == [3, 4]
    reports = run.reports | resumed.reports
    trained_at = first | resumed.trained_at
    attempts = await run.attempts()
    after = {attempt.attempt_id: attempt for _, attempt in attempts}
    done = {name for name, attempt in before.items() if isinstance(attempt.outcome, Verdict)}
    assert all(after[name] == before[name] for name in done)  # kept, not run again
    verdicts = [(rollout, attempt) for rollout, attempt in attempts if isinstance(attempt.outcome, Verdict)]
    assert len(verdicts) == len({rollout.rollout_id for rollout, _ in verdicts}) == 16  # each once
    for rollout, attempt in verdicts:
        assert rollout.step - 2 <= attempt.weights_version <= rollout.step - 1
    overlapping = [a for r, a in verdicts if r.step > 1 and a.started_at < trained_at[r.step - 1]]
    assert overlapping
    versions = await run.versions()
    assert all(step - 2 <= version <= step - 1 for step, version in versions)
    assert any(version == step - 2 for step, version in versions)
    assert {report.staleness_max for report in reports.values()} <= {0, 1}
    early = sum(attempt.weights_version == rollout.step - 2 for rollout, attempt in verdicts)
    assert sum(report.rollouts_ahead for report in reports.values()) == early > 0
    for report in reports.values():
        assert "stale" not in report.totals.masked  # kept off by when they begin, not masked afterwards
    assert msgspec.json.decode(msgspec.json.encode(reports[3]), type=StepReport) == reports[3]
