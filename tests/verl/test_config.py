"""`--dry-run`: what is printed is veRL's own resolved config, and what veRL refuses is refused in its words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from setting import write_setting

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


def dry_run(*words: str) -> tuple[int, str]:
    """Exit code, and what is printed: on stdout when it is 0, else on stderr."""
    command = [sys.executable, "-c", "from openforgerl.cli.main import main; main()", "train", *words, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr if done.returncode else done.stdout


def test_grpo_prints_the_command_and_verls_whole_config(tmp_path: Path) -> None:
    config = write_setting(tmp_path, steps=4, tasks=("verl/task-0", "verl/task-1"))
    settings = (
        "train.clip_high=0.31",
        "verl.actor_rollout_ref.actor.use_kl_loss=true",
        "verl.algorithm.filter_groups.enable=true",
        "verl.trainer.v1.trainer_mode=colocate_async",
        "verl.trainer.v1.sampler.max_off_policy_threshold=2",
    )
    words = [word for setting in settings for word in ("-s", setting)]
    code, output = dry_run("grpo", "-c", str(config), "--run", str(tmp_path / "run"), *words)
    assert code == 0, output
    command, _, text = output.partition("\n")
    assert command.startswith("# ") and "-m openforgerl.training.verl.main" in command
    resolved = yaml.safe_load(text)
    actor, rollout = resolved["actor_rollout_ref"]["actor"], resolved["actor_rollout_ref"]["rollout"]
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["use_kl_loss"]) == (0.2, 0.31, True)
    assert rollout["agent"]["agent_loop_manager_class"].endswith("AgentLoops")
    assert (rollout["name"], rollout["n"], rollout["prompt_length"]) == ("openforgerl_torch", 4, 2024)
    correction = resolved["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_is_threshold"]) == ("token", 2.0)
    assert resolved["algorithm"]["filter_groups"]["enable"]
    assert resolved["trainer"]["v1"]["sampler"] == {
        "max_off_policy_threshold": 2,
        "max_off_policy_strategy": "drop",
        "sync_refill_failed_groups": True,
        "custom_sampler": {"path": None, "name": None},
        "sampler_kwargs": {},
    }
    assert not (tmp_path / "run").exists()


def resolved_recipe(name: str, run: Path, *settings: str) -> dict[str, Any]:
    """veRL's config of a recipe, on tasks and a model that are at hand."""
    root = Path(__file__).parents[2]
    words = ["grpo", str(root / "src/openforgerl/demo/tasks"), "-c", str(root / name), "--run", str(run)]
    words += ["--model", str(root / "src/openforgerl/demo/base"), "--trainer", "verl"]
    code, output = dry_run(*words, *(word for setting in settings for word in ("-s", setting)))
    assert code == 0, output
    return yaml.safe_load(output.partition("\n")[2])


def test_the_recipe_is_taken_by_verl(tmp_path: Path) -> None:
    resolved = resolved_recipe("recipes/claw.toml", tmp_path / "run")
    actor, rollout = resolved["actor_rollout_ref"]["actor"], resolved["actor_rollout_ref"]["rollout"]
    assert (resolved["data"]["train_batch_size"], rollout["n"], rollout["name"]) == (8, 8, "vllm")
    assert (actor["optim"]["lr"], actor["use_kl_loss"], actor["kl_loss_coef"]) == (1e-6, True, 0.001)


def test_the_gui_recipes_are_taken_by_verl(tmp_path: Path) -> None:
    desktop = resolved_recipe("recipes/gui.toml", tmp_path / "desktop")
    browser = resolved_recipe("recipes/gui-browser.toml", tmp_path / "browser")
    for resolved, batch, group, entropy in ((desktop, 8, 8, 0), (browser, 8, 5, 0.001)):
        actor, rollout = resolved["actor_rollout_ref"]["actor"], resolved["actor_rollout_ref"]["rollout"]
        assert (resolved["data"]["train_batch_size"], rollout["n"], actor["entropy_coeff"]) == (batch, group, entropy)
        assert (actor["optim"]["lr"], actor["use_kl_loss"], actor["freeze_vision_tower"]) == (1e-6, False, True)


def test_the_clusters_config_is_taken_by_verl(tmp_path: Path) -> None:
    resolved = resolved_recipe("deploy/ray/training/train.toml", tmp_path / "run")
    assert (resolved["trainer"]["nnodes"], resolved["trainer"]["n_gpus_per_node"]) == (1, 8)
    assert "hf_model" in resolved["actor_rollout_ref"]["actor"]["checkpoint"]["save_contents"]


def test_lora_is_said_in_verls_words_and_its_own_words_win(tmp_path: Path) -> None:
    ours = (
        "train.learner.lora.rank=8",
        "train.learner.lora.alpha=16",
        'train.learner.lora.targets=["q_proj","v_proj"]',
    )
    model = resolved_recipe("recipes/claw.toml", tmp_path / "a", *ours)["actor_rollout_ref"]["model"]
    assert (model["lora_rank"], model["lora_alpha"], model["target_modules"]) == (8, 16, ["q_proj", "v_proj"])
    assert model["lora"]["merge"] is True
    # Without merge veRL asks vLLM which ranks it takes, and vLLM is not here.
    theirs = tuple(
        f"verl.actor_rollout_ref.model.{word}" for word in ("lora_rank=32", "lora_alpha=64", "lora.merge=true")
    )
    model = resolved_recipe("recipes/claw.toml", tmp_path / "b", *theirs)["actor_rollout_ref"]["model"]
    assert (model["lora_rank"], model["lora_alpha"], model["target_modules"]) == (32, 64, "all-linear")
    model = resolved_recipe("recipes/claw.toml", tmp_path / "c", *ours, *theirs)["actor_rollout_ref"]["model"]
    assert (model["lora_rank"], model["target_modules"]) == (32, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("verl.trainer.nonsense=3", "Could not override 'trainer.nonsense'"),
        ("verl.actor_rollout_ref.actor.loss_agg_mode=median", "Invalid loss_agg_mode: median"),
    ],
)
def test_what_verl_refuses(setting: str, said: str, tmp_path: Path) -> None:
    config = write_setting(tmp_path, steps=4, tasks=("verl/task-0", "verl/task-1"))
    code, output = dry_run("grpo", "-c", str(config), "--run", str(tmp_path / "run"), "-s", setting)
    assert code == 2
    assert "veRL refuses this config" in output and said in " ".join(output.split())


def test_sft_prints_its_config(tmp_path: Path) -> None:
    write_setting(tmp_path, steps=4, tasks=("verl/task-0",))
    (tmp_path / "run").mkdir()
    words = ["-s", "sft.learner.optimizer.kind=adamw", "-s", "sft.learner.optimizer.lr=1e-4"]
    words += ["-s", "sft.learner.lora.rank=4"]
    model = str(tmp_path / "model")
    code, output = dry_run(
        "sft", str(tmp_path / "run"), "--model", model, "--out", str(tmp_path / "out"), "--trainer", "verl", *words
    )
    assert code == 0, output
    resolved = yaml.safe_load(output.partition("\n")[2])
    assert resolved["optim"]["lr"] == 1e-4
    assert (resolved["model"]["lora_rank"], resolved["model"]["lora_alpha"]) == (4, 32)
    assert resolved["data"]["custom_cls"]["name"] == "ExactRows"
    assert not (tmp_path / "out").exists()
