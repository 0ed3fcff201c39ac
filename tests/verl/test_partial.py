"""veRL's `colocate_async`: rollouts go on while weights change, and the record says which weights sampled what."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from setting import write_setting

from openforgerl.orchestrator.assembly import read_run
from openforgerl.store import RunStore
from openforgerl.training.learner import Learner
from openforgerl.training.options import LearnerOptions
from openforgerl.types import ModelCall, Sample

pytestmark = [pytest.mark.verl, pytest.mark.timeout(2400)]

SETTINGS = (
    "rollout.max_output_tokens=700",  # long enough to be under way when weights change
    "run.concurrency=4",
    "train.groups_per_step=1",
    "verl.trainer.v1.trainer_mode=colocate_async",
    "verl.trainer.v1.colocate_async.num_warmup_batches=2",
    "verl.trainer.save_freq=4",
    'verl.actor_rollout_ref.actor.checkpoint.save_contents=["hf_model"]',
)


async def read(folder: Path) -> tuple[list[ModelCall], list[Sample]]:
    database = read_run(folder)
    try:
        store = RunStore(database)
        attempts = [attempt.attempt_id for attempt in await store.attempts()]
        calls = [call for attempt in attempts for call in await store.calls(attempt)]
        return calls, [one for found in (await store.samples(attempts)).values() for one in found.samples]
    finally:
        await database.close()


def test_an_answer_goes_on_under_new_weights(tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    config = write_setting(tmp_path, steps=4, tasks=("verl/task-0", "verl/task-2", "verl/task-3"))
    words = [word for setting in SETTINGS for word in ("-s", setting)]
    log = tmp_path / "log.txt"
    code = start("train", "grpo", "-c", str(config), "--run", str(tmp_path / "run"), *words, log=log).wait(2000)
    assert code == 0, log.read_text(errors="replace")[-6000:]

    calls, samples = asyncio.run(read(tmp_path / "run"))
    crossing = [call for call in calls if len({span.version for span in call.weights_spans}) > 1]
    assert crossing
    for call in crossing:
        assert [span.start for span in call.weights_spans] == [0, *(span.stop for span in call.weights_spans[:-1])]
        assert call.weights_spans[-1].stop == len(call.sampled_ids)
    versions = {span.weights_version for sample in samples for span in sample.spans}
    assert max(versions) > min(versions)
    lines = (tmp_path / "run" / "verl_metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["data"] for line in lines]
    assert len(metrics) == 4
    assert max(data["training/off_policy/trajectory_staleness/max"] for data in metrics) >= 1
    compared = [data["training/served_logprob_difference/max"] for data in metrics if _compared(data)]
    assert compared and max(compared) < 1e-3
    model = tmp_path / "run/checkpoints/verl/global_step_4/actor/huggingface"
    assert Learner(model, LearnerOptions()).evaluate(samples[:1]).tokens == samples[0].trained_tokens


def _compared(data: dict[str, float]) -> bool:
    return "training/served_logprob_difference/max" in data
