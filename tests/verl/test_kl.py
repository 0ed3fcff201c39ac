"""veRL with a reference model on the processor: the KL that it says is that of the weights that it began with."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from setting import write_setting

pytestmark = [pytest.mark.verl, pytest.mark.timeout(2400)]

SETTINGS = (
    "verl.actor_rollout_ref.actor.use_kl_loss=true",
    "verl.actor_rollout_ref.actor.kl_loss_coef=0.5",
    "train.groups_per_step=1",
    "train.learner.optimizer.lr=0.01",
    "train.learner.optimizer.warmup_steps=2",  # veRL begins it at a rate of 0
)


def test_a_reference_model_holds_the_policy(tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    config = write_setting(tmp_path, steps=2, tasks=("verl/task-0", "verl/task-2"))
    words = [word for setting in SETTINGS for word in ("-s", setting)]
    log = tmp_path / "log.txt"
    code = start("train", "grpo", "-c", str(config), "--run", str(tmp_path / "run"), *words, log=log).wait(2000)
    assert code == 0, log.read_text(errors="replace")[-6000:]
    lines = (tmp_path / "run" / "verl_metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["data"] for line in lines)
    # A step is two updates, each measured before it is made. The very first has a rate of 0, so all of the first step
    # is measured on the weights that the reference has; the second is not.
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second["actor/kl_loss"] > 1e-5 and math.isfinite(second["actor/kl_loss"])
    assert first["actor/kl_coef"] == 0.5
