"""veRL's SFT trainer on solved attempts: the ids as recorded, and the loss that our own learner has on them."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from openforgerl.store import Database, RunStore
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.learner import Learner
from openforgerl.training.options import LearnerOptions
from openforgerl.types import Attempt, Rollout, Sample, SampleSet, Source, Span, Totals, Verdict

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

CONFIG = """
trainer = "verl"
[sft]
steps = 3
batch_samples = 6
[sft.learner.optimizer]
kind = "adamw"
lr = 3e-3
warmup_steps = 0
[verl.trainer]
device = "cpu"
"""


def recorded(number: int) -> Sample:
    draw = random.Random(number)
    ids = tuple(draw.randrange(512) for _ in range(draw.randrange(30, 90)))
    spans = [(10, 15 + number), (20 + number, len(ids))]
    return Sample(
        sample_id=f"s{number}", attempt_id=f"r{number}-a0", rollout_id=f"r{number}", group_id=f"r{number}", ids=ids,
        spans=tuple(
            Span(start=start, stop=stop, call_id=f"c{number}", offset=0, state="trained") for start, stop in spans
        ),
        logprobs=None, source=Source.TEACHER,
    )  # fmt: skip


async def write_run(folder: Path, samples: list[Sample]) -> None:
    """A run whose attempts are solved, but for the last."""
    folder.mkdir()
    database = Database.open(folder / "run.sqlite")
    try:
        store = RunStore(database)
        await store.put_run("run", "digest", {})
        for number, one in enumerate(samples):
            rollout = Rollout(
                rollout_id=one.rollout_id, run_id="run", task=f"t{number}", task_digest="", harness="pi",
                group_id=one.group_id, index=0, seed=0, purpose="teacher",
            )  # fmt: skip
            await store.plan([rollout])
            attempt = Attempt(attempt_id=one.attempt_id, rollout_id=one.rollout_id, number=0, started_at=0.0)
            await store.begin_attempt(attempt)
            solved = number < len(samples) - 1
            verdict = Verdict(reward=float(solved), passed=solved)
            totals = Totals(sampled=one.trained_tokens, trained=one.trained_tokens)
            done = msgspec.structs.replace(attempt, outcome=verdict, finished_at=1.0)
            await store.commit(done, SampleSet(samples=(one,), totals=totals))
    finally:
        await database.close()


def test_verl_trains_on_the_recorded_ids(tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    samples = [recorded(number) for number in range(7)]
    asyncio.run(write_run(tmp_path / "run", samples))
    model = write_tiny_model(tmp_path / "model", seed=2)
    (tmp_path / "sft.toml").write_text(CONFIG)
    out, log = tmp_path / "out", tmp_path / "log.txt"
    words = ("train", "sft", str(tmp_path / "run"), "--model", str(model), "--out", str(out))
    code = start(*words, "-c", str(tmp_path / "sft.toml"), log=log).wait(1500)
    assert code == 0, log.read_text(errors="replace")[-6000:]

    solved = samples[:6]
    rows = pq.read_table(out / "rows.parquet").to_pylist()
    assert [tuple(row["input_ids"]) for row in rows] == [one.ids for one in solved]
    losses = [json.loads(line)["data"]["train/loss"] for line in (out / "verl_metrics.jsonl").read_text().splitlines()]
    expected = Learner(model, LearnerOptions()).evaluate(solved).loss
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[0] > losses[1] > losses[2]
    assert (out / "global_step_3").is_dir()
