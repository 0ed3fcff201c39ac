"""Each recipe is a config that we take, and says in veRL's words what the paper says."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforgerl.config import load_config
from openforgerl.errors import ConfigError
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.verl.command import grpo_overrides

ROOT = Path(__file__).parents[2]


def test_claw_has_the_papers_values() -> None:
    """arXiv 2607.21557: batch 8, groups of 8, lr 1e-6, KL 1e-3, 900 s a rollout, in three harnesses."""
    flags = {"engine": {"kind": "torch", "path": "models/policy"}}
    config = load_config(GrpoConfig, ROOT / "recipes/claw.toml", (), flags=flags)
    assert set(config.harnesses) == {"zeroclaw", "openclaw", "codex"}
    assert (config.rollout.agent_timeout, config.rollout.on_timeout) == (900.0, "discard")
    said = grpo_overrides(config, Path("runs/claw"), tasks=100)
    expected = {
        "data.train_batch_size": 8,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    }
    assert {name: said[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "group", "entropy"), [("gui", 8, None), ("gui-browser", 5, 0.001)], ids=["desktop", "browser"]
)
def test_gui_has_the_papers_values(name: str, group: int, entropy: float | None) -> None:
    """arXiv 2607.21557: lr 1e-6, batch 8 and groups of 8; in the browser groups of 5, no KL and entropy 1e-3."""
    flags = {"engine": {"kind": "torch", "path": "models/policy"}}
    config = load_config(GrpoConfig, ROOT / "recipes" / f"{name}.toml", (), flags=flags)
    assert config.harness.images
    assert set(config.harnesses) == {"pi"}
    said = grpo_overrides(config, Path("runs/gui"), tasks=100)
    assert (said["data.train_batch_size"], said["actor_rollout_ref.rollout.n"]) == (8, group)
    assert said["actor_rollout_ref.actor.optim.lr"] == 1e-6
    assert said["actor_rollout_ref.actor.use_kl_loss"] is False
    assert said.get("actor_rollout_ref.actor.entropy_coeff") == entropy


def test_an_adapter_is_said_in_verls_words() -> None:
    flags = {"engine": {"kind": "torch", "path": "models/policy"}}
    settings = ["train.learner.lora.rank=8", "train.learner.lora.alpha=16"]
    config = load_config(GrpoConfig, ROOT / "recipes/claw.toml", settings, flags=flags)
    said = grpo_overrides(config, Path("runs/claw"), tasks=100)
    model = "actor_rollout_ref.model"
    assert {name: said[f"{model}.{name}"] for name in ("lora_rank", "lora_alpha", "target_modules", "lora.merge")} == {
        "lora_rank": 8,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "lora.merge": True,
    }
    odd = load_config(GrpoConfig, ROOT / "recipes/claw.toml", ["train.learner.lora.alpha=1.5"], flags=flags)
    with pytest.raises(ConfigError, match=r"learner\.lora\.alpha: veRL takes whole numbers, not 1\.5"):
        grpo_overrides(odd, Path("runs/claw"), tasks=100)
