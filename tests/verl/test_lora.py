"""Real veRL with an adapter, on the processor: the sum is pushed to the server, and it is the one that is trained."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from setting import write_setting

pytestmark = [pytest.mark.verl, pytest.mark.timeout(3600)]


def test_two_steps_with_an_adapter(tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """A base served without its adapter would stop the second step. veRL 0.9 sends the sum in bf16 whatever it trains
    in (fsdp/transformer_impl.py, _merged_lora_per_tensor_param), which this model feels at 6e-3 nats."""
    config = write_setting(tmp_path, steps=2, tasks=("verl/task-0", "verl/task-2"))
    settings = ("train.learner.lora.rank=4", "train.learner.lora.alpha=64", "train.learner.optimizer.lr=1e-2")
    settings += ("train.served_difference=0.02",)
    words = [word for setting in settings for word in ("-s", setting)]
    log = tmp_path / "log.txt"
    process = start("train", "grpo", "-c", str(config), "--run", str(tmp_path / "run"), *words, log=log)
    try:
        code = process.wait(1800)
    finally:
        if process.poll() is None:
            process.kill()
    assert code == 0, log.read_text(errors="replace")[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "verl_metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row["data"] for row in rows}
    assert sorted(step for step in steps if step) == [1, 2]
    assert steps[1]["actor/grad_norm"] > 0
    for step in (1, 2):
        assert 0 < steps[step]["training/served_logprob_difference/mean"] < 0.02
    held = [path.name for path in (tmp_path / "run" / "checkpoints" / "verl" / "global_step_2" / "actor").iterdir()]
    assert any(name.startswith("model_") for name in held), held
    print("files of veRL's checkpoint:", sorted(held))
    print("mean differences:", [steps[step]["training/served_logprob_difference/mean"] for step in (1, 2)])
