"""Write `tests/training/golden/verl_losses.json`: advantages and policy losses as veRL computes them.

The test `tests/training/test_algorithms.py` holds our `training/algorithms.py` to these numbers without needing
veRL. To write them anew, in a virtual environment of its own (veRL pins another transformers than we do):

    python3.11 -m venv verl-venv
    verl-venv/bin/pip install torch==2.13.0
    verl-venv/bin/pip install verl==0.9.1 TransferQueue pyzmq msgspec fastapi uvicorn cachetools
    VERL_PLATFORM=cpu verl-venv/bin/python scripts/golden_losses.py tests/training/golden/verl_losses.json
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos

SEED = 20261130
REWARDS: dict[str, list[float]] = {
    "mixed": [0.0, 1.0, 1.0, 0.0],
    "one_of_eight": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    "graded": [0.25, 0.5, 0.125, 1.0, 0.75],
    "all_equal": [1.0, 1.0, 1.0, 1.0],
    "negative": [-1.0, 2.0, 0.5],
    "pair": [0.0, 1.0],
}
CLIPS: dict[str, tuple[float, float, float]] = {
    "symmetric": (0.2, 0.2, 3.0),
    "clip_higher": (0.2, 0.28, 3.0),
    "tight_dual": (0.2, 0.28, 1.05),
    "wide": (0.5, 4.0, 10.0),
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


class Config(dict[str, Any]):
    """What `compute_policy_loss_vanilla` reads of its actor config."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def advantages() -> list[dict[str, Any]]:
    """veRL's GRPO outcome advantages of each reward list, with and without the deviation in the divisor."""
    cases: list[dict[str, Any]] = []
    for name, rewards in REWARDS.items():
        for normalise in (True, False):
            scores = torch.tensor(rewards, dtype=torch.float64)[:, None]
            values, _ = core_algos.compute_grpo_outcome_advantage(
                scores.clone(),
                torch.ones_like(scores),
                np.array(["g"] * len(rewards)),
                norm_adv_by_std_in_grpo=normalise,
            )
            cases.append(
                {"name": name, "rewards": rewards, "normalise_std": normalise, "advantages": values[:, 0].tolist()}
            )
    return cases


def losses() -> dict[str, Any]:
    """veRL's clipped policy loss, its clip fractions and its gradient, on one batch for every clip and mode."""
    generator = torch.Generator().manual_seed(SEED)
    rows, tokens = 6, 9
    new = torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * 0.6 - 2
    old = new + torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * 0.5
    old[0, 0] = new[0, 0] - 25  # beyond the ±20 clamp of the log ratio, both ways
    old[3, 1] = new[3, 1] + 25
    mask = (torch.rand(rows, tokens, generator=generator) > 0.35).double()
    mask[0, 0] = mask[3, 1] = 1
    mask[5] = 0  # a row without a trained token
    advantage = torch.tensor([1.2, -0.7, 0.0, -1.5, 0.4, 2.0], dtype=torch.float64)[:, None].expand(rows, tokens)
    cases: list[dict[str, Any]] = []
    for clip_name, (low, high, dual) in CLIPS.items():
        for mode in MODES:
            leaf = new.clone().requires_grad_()
            config = Config(
                clip_ratio=0.2,
                clip_ratio_low=low,
                clip_ratio_high=high,
                clip_ratio_c=dual,
                loss_agg_mode=mode,
                policy_loss=Config(),
                global_batch_info={},
            )
            loss, metrics = core_algos.compute_policy_loss_vanilla(
                old_log_prob=old,
                log_prob=leaf,
                advantages=advantage,
                response_mask=mask,
                loss_agg_mode=mode,
                config=config,
            )
            loss.backward()
            assert leaf.grad is not None
            cases.append(
                {
                    "clip": clip_name,
                    "clip_low": low,
                    "clip_high": high,
                    "clip_dual": dual,
                    "mode": mode,
                    "loss": loss.item(),
                    "grad": leaf.grad.tolist(),
                    "clip_fraction": float(metrics["actor/pg_clipfrac"]),
                    "dual_clip_fraction": float(metrics["actor/pg_clipfrac_lower"]),
                }
            )
    return {
        "logprob": new.tolist(),
        "old_logprob": old.tolist(),
        "mask": mask.tolist(),
        "advantage": advantage[:, 0].tolist(),
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    golden = {
        "made_by": "scripts/golden_losses.py",
        "verl": version("verl"),
        "torch": torch.__version__,
        "seed": SEED,
        "advantages": advantages(),
        "losses": losses(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"wrote {output}: {len(golden['advantages'])} advantage cases, {len(golden['losses']['cases'])} loss cases")


if __name__ == "__main__":
    main()
