"""TRL's rollout function, held to the contract read from its source, and run with a real harness and engine."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openforgerl.errors import ConfigError, InputError, TrainingError
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.trl import LEFT_OUT, REWARD, HarnessRollouts, verdict_reward

HERE = Path(__file__).parent
CONTRACT: dict[str, Any] = json.loads((HERE / "contracts/trl.json").read_text())
TASKS = ("trl/task-0", "trl/task-1", "trl/task-broken")
CONFIG = """
seed = 5
[tasks]
path = "{tasks}"
[engine]
path = "{model}"
context_length = 2048
[harness]
name = "says:SayingReact"
[rollout]
max_output_tokens = 12
calls = 3
[run]
concurrency = 2
refill_limit = 1
"""

Start = Callable[[], HarnessRollouts]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Rollouts in a run folder; called again, those of the next process."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / "verl"))
    tasks = importlib.import_module("setting").write_tasks(tmp_path / "tasks", TASKS)
    model = write_tiny_model(tmp_path / "model", seed=1)
    config = tmp_path / "grpo.toml"
    config.write_text(CONFIG.format(tasks=tasks, model=model))
    opened: list[HarnessRollouts] = []

    def begin() -> HarnessRollouts:
        opened.append(HarnessRollouts(config, tmp_path / "run"))
        return opened[-1]

    yield begin
    for rollouts in opened:
        rollouts.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    """What the rollout function reads of a `GRPOTrainer`."""

    def make(**arguments: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
        return SimpleNamespace(
            model=model,
            args=SimpleNamespace(**(neutral | arguments)),
            state=SimpleNamespace(global_step=0),
            accelerator=SimpleNamespace(num_processes=1, unwrap_model=lambda wrapped: wrapped),
            num_generations=2,
            num_generations_eval=1,
        )

    return make


def update(trainer: Any, scale: float = 1.05) -> None:
    """An optimizer step, as far as anybody outside can tell."""
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight *= scale
    trainer.state.global_step += 1


def test_trl_can_call_us() -> None:
    inspect.signature(HarnessRollouts.__call__).bind(None, *CONTRACT["rollout_call"])
    assert {"rollout_func", "reward_funcs"} <= set(CONTRACT["trainer_init"])
    columns = {name: [] for name in (*CONTRACT["reward_call"], REWARD, LEFT_OUT, "trainer_state", "log_extra")}
    inspect.signature(verdict_reward).bind(**columns, log_metric=None)
    with pytest.raises(ConfigError, match="goes with HarnessRollouts"):
        verdict_reward(prompts=[], completions=[], completion_ids=[])


@pytest.mark.sandbox
def test_groups_are_rolled_out_with_the_newest_weights(start: Start, trainer: Callable[..., Any]) -> None:
    rollouts, trl = start(), trainer()
    assert rollouts.prompts == [{"prompt": name} for name in TASKS]
    prompts = [TASKS[0]] * 2 + [TASKS[2]] * 2 + [TASKS[1]] * 2
    output = rollouts(prompts, trl)
    assert set(CONTRACT["required"]) | {CONTRACT["mask"], REWARD, LEFT_OUT} == output.keys()
    assert all(len(column) == 6 for column in output.values())
    for name in ("completion_ids", "logprobs", "env_mask"):
        assert [len(row) for row in output[name]] == [len(row) for row in output["env_mask"]]
    # Every rollout of the broken task failed, again when refilled: its group trains nothing and has no reward.
    assert [reward is None for reward in output[REWARD]] == [False, False, True, True, False, False]
    assert [sum(mask) for mask in output["env_mask"][2:4]] == [0, 0]
    metrics: dict[str, float] = {}
    rewards = verdict_reward(prompts=prompts, log_metric=metrics.__setitem__, **output)
    assert rewards == output[REWARD] and metrics == {"openforgerl/trained_tokens_left_out": 0.0}
    # The recorded log-probs are those of the weights that TRL has: before the update and after it.
    for step in (0, 1):
        if step:
            update(trl)
            output = rollouts([TASKS[0]] * 2, trl)
        for prompt, answer, mask, recorded in zip(
            *(output[name][:2] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
        ):
            with torch.no_grad():
                logits = trl.model.eval()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
            pairs = [(ours, theirs) for ours, theirs, on in zip(recorded, scored, mask, strict=True) if on]
            assert pairs and max(abs(ours - theirs) for ours, theirs in pairs) < 1e-4
        trl.model.train()


@pytest.mark.sandbox
def test_a_killed_run_gets_what_was_finished_and_never_what_newer_weights_said(
    start: Start, trainer: Callable[..., Any]
) -> None:
    first, trl = start(), trainer()
    said = first([TASKS[0]] * 2, trl)
    first.close()
    second = start()
    assert second([TASKS[0]] * 2, trl) == said  # nothing was updated since: finished attempts are handed out again
    update(trl)
    later = second([TASKS[0]] * 2, trl)
    assert later["completion_ids"] != said["completion_ids"]
    second.close()
    # TRL's checkpoint is older than what the run went on to do: other rollouts, under other ids.
    trl.state.global_step = 0
    third = start()
    assert third([TASKS[0]] * 2, trl)["prompt_ids"] == said["prompt_ids"]
    assert third._legs is not None and third._legs.leg == 1


@pytest.mark.sandbox
def test_other_weights_than_trls_stop_training(
    start: Start, trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, trl = start(), trainer()
    load = HarnessRollouts._load

    async def forgets(self: HarnessRollouts, model: Any, version: int) -> None:
        old = AutoModelForCausalLM.from_pretrained(Path(self._config.engine.path), dtype=torch.float32)
        await load(self, old, version)

    rollouts([TASKS[0]] * 2, trl)
    update(trl)
    monkeypatch.setattr(HarnessRollouts, "_load", forgets)
    with pytest.raises(TrainingError, match="served and trained weights of version 1 differ"):
        rollouts([TASKS[0]] * 2, trl)


@pytest.mark.sandbox
def test_when_nothing_could_be_completed_training_stops(start: Start, trainer: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match=r"no group could be completed for trl/task-broken; .* --failed"):
        start()([TASKS[2]] * 2, trainer())


@pytest.mark.sandbox
def test_what_cannot_be_trained_is_said_before_anything_runs(start: Start, trainer: Callable[..., Any]) -> None:
    rollouts = start()
    for wrong in ({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"GRPOConfig.{name} is"):
            rollouts([TASKS[0]] * 2, trainer(**wrong))
    for prompts in ([TASKS[0], TASKS[1]], [TASKS[0]], ["unknown"] * 2):
        with pytest.raises(InputError, match=r"no whole group|names no task"):
            rollouts(prompts, trainer())
    trl = trainer()
    trl.accelerator.num_processes = 2
    with pytest.raises(ConfigError, match="several processes"):
        rollouts([TASKS[0]] * 2, trl)
    trl = trainer()
    trl.model.peft_config = {}
    with pytest.raises(ConfigError, match="adapter"):
        rollouts([TASKS[0]] * 2, trl)


@pytest.mark.slow
def test_the_contract_is_that_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl", reason="pip install trl==1.16.0, with datasets and accelerate")
    script = HERE.parents[1] / "scripts/read_contracts.py"
    words = [sys.executable, script, "trl", Path(trl.__file__).parents[1]]
    assert json.loads(subprocess.check_output(words)) == CONTRACT
