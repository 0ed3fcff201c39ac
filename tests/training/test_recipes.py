"""Each recipe is a config that we take, and says in veRL's words what the paper says."""

from __future__ import annotations

from pathlib import Path

from openforgerl.config import load_config
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
