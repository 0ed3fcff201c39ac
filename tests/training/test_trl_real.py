"""TRL's own GRPOTrainer with every rollout in a harness: real updates, pushed to our engine before each collection."""

from __future__ import annotations

import asyncio
import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from openforgerl.orchestrator.assembly import read_run
from openforgerl.store import RunStore
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Verdict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sandbox,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # other people's code
]

HERE = Path(__file__).parent
TASKS = ("trl/task-0", "trl/task-1", "trl/task-2", "trl/task-3")
STEPS, GROUPS, SIZE = 3, 2, 4
CONFIG = """
seed = 5
[tasks]
path = "{tasks}"
[engine]
path = "{model}"
context_length = 4096
[harness]
name = "{harness}"
[harness.pi]
tools = ["bash"]
system_prompt = "You are an agent."
[rollout]
max_output_tokens = 24
calls = 3
[run]
concurrency = 2
"""


async def recorded(folder: Path) -> list[tuple[int, int, float, set[int]]]:
    """Step, weights version at the start, reward and versions of the trained tokens, of every graded attempt."""
    database = read_run(folder)
    try:
        store = RunStore(database)
        steps = {rollout.rollout_id: rollout.step for rollout in await store.rollouts()}
        attempts = [one for one in await store.attempts() if isinstance(one.outcome, Verdict)]
        samples = await store.samples([attempt.attempt_id for attempt in attempts])
        return [
            (
                steps[attempt.rollout_id],
                attempt.weights_version,
                attempt.outcome.reward,
                {span.weights_version for sample in samples[attempt.attempt_id].samples for span in sample.spans},
            )
            for attempt in attempts
            if isinstance(attempt.outcome, Verdict)
        ]
    finally:
        await database.close()


@pytest.mark.parametrize("harness", ["says:SayingReact", pytest.param("says:SayingPi", marks=pytest.mark.node)])
def test_trl_trains_on_rollouts_in_a_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str) -> None:
    pytest.importorskip("trl", reason="pip install trl==1.16.0, with datasets and accelerate")
    import torch  # noqa: PLC0415  (slow to import)
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    from openforgerl.training.trl import HarnessRollouts, verdict_reward  # noqa: PLC0415

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / "verl"))
    tasks = importlib.import_module("setting").write_tasks(tmp_path / "tasks", TASKS)
    model = write_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "grpo.toml").write_text(CONFIG.format(tasks=tasks, model=model, harness=harness))
    rollouts = HarnessRollouts(tmp_path / "grpo.toml", tmp_path / "run")
    norms: list[float] = []

    class Remembers(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            norms.append(
                math.fsum(float(weight.detach().double().abs().sum()) for weight in more["model"].parameters())
            )

    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE, learning_rate=1e-3, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        gradient_checkpointing=False, logging_steps=1, max_completion_length=64, beta=0.0, seed=3,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(rollouts.prompts),
        reward_funcs=verdict_reward,
        rollout_func=rollouts,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Remembers()],
    )
    try:
        trainer.train()
    finally:
        rollouts.close()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in logs] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in logs)
    assert any(line["grad_norm"] > 0 for line in logs) and len(set(norms)) == STEPS
    found = asyncio.run(recorded(tmp_path / "run"))
    assert len(found) == STEPS * GROUPS * SIZE
    for step in range(1, STEPS + 1):
        mine = [one for one in found if one[0] == step]
        assert len(mine) == GROUPS * SIZE
        # Every call of the step was answered with the weights that the updates before it made.
        assert {version for _, version, _, _ in mine} == {step - 1}
        assert set().union(*(versions for *_, versions in mine)) == {step - 1}
        mean = sum(reward for _, _, reward, _ in mine) / len(mine)
        assert logs[step - 1]["reward"] == pytest.approx(mean, abs=1e-5)
        assert logs[step - 1]["rewards/verdict_reward/mean"] == pytest.approx(mean, abs=1e-5)
    print(f"\n{harness}: rewards {[round(line['reward'], 3) for line in logs]}", end=" ")
    print(f"losses {[line['loss'] for line in logs]} gradients {[round(line['grad_norm'], 3) for line in logs]}")
