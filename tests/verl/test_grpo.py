"""Real veRL GRPO on the processor: pi in process sandboxes, killed in the middle, resumed; every promise looked up.

One run for all tests: 5 steps of 2 groups of 4, interrupted, then steps 5 and 6 from the checkpoint of step 4.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from setting import write_setting
from twice import ALWAYS_FAILS, FAILS_ONCE

from openforgerl.orchestrator.assembly import read_run
from openforgerl.store import RunStore
from openforgerl.types import Attempt, Failure, Rollout, Sample, Verdict

pytestmark = [pytest.mark.verl, pytest.mark.timeout(3600)]

TASKS = ("verl/task-0", FAILS_ONCE, "verl/task-2", "verl/task-3", ALWAYS_FAILS)
Steps = dict[int, dict[str, Any]]
Member = tuple[Rollout, Attempt, tuple[Sample, ...]]


@dataclass(frozen=True)
class Run:
    """What two starts of one run left behind."""

    folder: Path
    first: Steps
    """Metrics by step, of the start that was interrupted."""
    second: Steps
    codes: tuple[int, int]
    members: list[Member]
    """Every attempt with its rollout and samples."""

    def groups(self, step: int, leg: str) -> dict[str, list[Member]]:
        """Complete groups of a step: group id → the graded attempts."""
        groups: dict[str, list[Member]] = defaultdict(list)
        for rollout, attempt, samples in self.members:
            mine = rollout.purpose == "train" if leg == "0" else rollout.purpose.startswith(f"train:{leg}.")
            if mine and rollout.step == step and isinstance(attempt.outcome, Verdict):
                groups[rollout.group_id].append((rollout, attempt, samples))
        return {name: members for name, members in groups.items() if len(members) == 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., subprocess.Popen[bytes]]) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("grpo")
    config = write_setting(folder, steps=6, tasks=TASKS)
    words = ("train", "grpo", "-c", str(config), "--run", str(folder / "run"))
    metrics, log = folder / "run" / "verl_metrics.jsonl", folder / "log.txt"
    process = start(*words, log=log)
    try:
        wait_for(lambda: 5 in steps_of(metrics), process, log)
        first = steps_of(metrics)
        process.send_signal(signal.SIGTERM)
        interrupted = process.wait(120)
        process = start(*words, log=log)
        resumed = process.wait(1500)
        if resumed:
            pytest.fail(f"the resumed run ended with {resumed}:\n{tail(log)}")
    finally:
        if process.poll() is None:
            process.kill()
    yield Run(folder / "run", first, steps_of(metrics), (interrupted, resumed), recorded(folder / "run"))


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 1500) -> None:
    until = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > until:
            pytest.fail(f"veRL did not get there (exit {process.poll()}):\n{tail(log)}")
        time.sleep(0.5)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def steps_of(metrics: Path) -> Steps:
    if not metrics.is_file():
        return {}
    lines = metrics.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["data"] for row in rows}


def recorded(folder: Path) -> list[Member]:
    async def read() -> list[Member]:
        database = read_run(folder)
        try:
            store = RunStore(database)
            rollouts = {rollout.rollout_id: rollout for rollout in await store.rollouts()}
            attempts = await store.attempts()
            samples = await store.samples([attempt.attempt_id for attempt in attempts])
            return [
                (
                    rollouts[attempt.rollout_id],
                    attempt,
                    samples[attempt.attempt_id].samples if attempt.attempt_id in samples else (),
                )
                for attempt in attempts
            ]
        finally:
            await database.close()

    return asyncio.run(read())


def test_it_counts_on_after_the_interruption(run: Run) -> None:
    assert run.codes == (130, 0)
    assert sorted(run.first) == [1, 2, 3, 4, 5]
    assert sorted(run.second) == [5, 6]  # the checkpoint of step 4 is the last one before the interruption
    assert {path.name for path in (run.folder / "checkpoints/verl").glob("global_step_*")} >= {
        "global_step_4",
        "global_step_6",
    }


def test_the_resumed_run_goes_on_in_the_same_order_of_tasks(run: Run) -> None:
    def tasks(leg: str) -> set[str]:
        return {members[0][0].task for members in run.groups(5, leg).values()}

    assert tasks("0") == tasks("1")
    assert len(tasks("0")) == 2


def test_served_and_trained_log_probs_agree(run: Run) -> None:
    for metrics in (run.first, run.second):
        for step, data in metrics.items():
            largest = data["training/served_logprob_difference/max"]
            print(f"step {step}: |served - trained| log-prob at most {largest:.2e} nats")
            assert largest < 1e-3


def test_weights_were_pushed_before_every_step(run: Run) -> None:
    spans = [
        (rollout.step, attempt.weights_version, span.weights_version)
        for rollout, attempt, samples in run.members
        for sample in samples
        for span in sample.spans
    ]
    assert spans
    assert all(attempt == span == step - 1 for step, attempt, span in spans)


def test_every_rollout_has_two_sequences_and_veRL_trained_exactly_these(run: Run) -> None:
    counted = 0
    for leg, metrics in (("0", run.first), ("1", run.second)):
        for step, data in metrics.items():
            groups = run.groups(step, leg)
            members = [member for group in groups.values() for member in group]
            assert len(groups) == 2
            assert [len(samples) for _, _, samples in members] == [2] * 8
            rows = [sample for _, _, samples in members for sample in samples if sample.trained_tokens]
            assert data["actor/grad_norm"] > 0
            if len(rows) < 16:
                # A first answer without a word, which pi leaves out: nothing then says whose the second request is.
                assert all(sample.trained_tokens for _, _, samples in members for sample in samples[:1])
                continue
            # 16 rows are two mini-batches of 8, so veRL adds no padding: what it counts is what we recorded.
            assert data["perf/total_num_tokens"] == sum(len(sample.ids) for sample in rows)
            rewards = [attempt.outcome.reward for _, attempt, _ in members if isinstance(attempt.outcome, Verdict)]
            assert data["critic/score/mean"] == pytest.approx(statistics.fmean(rewards), abs=1e-6)
            counted += 1
    assert counted >= 4


def test_a_failed_attempt_was_tried_again_and_never_trained(run: Run) -> None:
    failed = [(r, a, s) for r, a, s in run.members if r.task == FAILS_ONCE and isinstance(a.outcome, Failure)]
    crashed = [rollout.rollout_id for rollout, attempt, _ in failed if attempt.outcome.kind == "crash"]  # type: ignore[union-attr]
    assert crashed
    for rollout, attempt, samples in run.members:
        if isinstance(attempt.outcome, Failure):
            assert samples == ()
        elif rollout.rollout_id in crashed:
            assert attempt.number == 1


def test_a_group_that_cannot_be_completed_gives_its_place_to_another_task(run: Run) -> None:
    broken = {rollout.step for rollout, _, _ in run.members if rollout.task == ALWAYS_FAILS}
    assert broken
    for step in broken & set(run.first):
        assert run.first[step]["training/rollout_failure/evicted_samples"] >= 1
        assert all(members[0][0].task != ALWAYS_FAILS for members in run.groups(step, "0").values())
