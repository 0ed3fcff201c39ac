"""The demo's config: the rooms' options with the values that fit two cores and a quarter of an hour."""

from __future__ import annotations

from typing import Any

import msgspec

from openforgerl.config import RoomsConfig
from openforgerl.orchestrator import RunOptions
from openforgerl.training.options import GrpoOptions, SftOptions


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of each stage."""

    teacher_rollouts: int = 3
    """Teacher rollouts per SFT task; successes are kept (the paper's recipe)."""
    eval_attempts: int = 3
    """Attempts per held-out task and stage: pass@3 and pass^3 need three."""
    eval_tasks: int | None = None
    """Held-out tasks of each split that are measured; null = all."""
    sft_tasks: int | None = None
    """Tasks that the teacher shows; null = all of the sft split."""
    validation_tasks: int | None = None
    """Tasks that SFT is validated on; null = all of the validation split."""

    def __post_init__(self) -> None:
        if self.teacher_rollouts < 1:
            raise ValueError(f"teacher_rollouts must be 1 or more; got {self.teacher_rollouts}")
        if self.eval_attempts < 3:
            raise ValueError(f"eval_attempts must be 3 or more, for pass@3 and pass^3; got {self.eval_attempts}")


class DemoConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the demo does follows from this and the package's own files."""

    run: RunOptions = RunOptions()
    demo: DemoOptions = DemoOptions()
    sft: SftOptions = SftOptions()
    train: GrpoOptions = GrpoOptions()


def demo_defaults(harness: str) -> dict[str, Any]:
    """What the demo sets before a person's own settings."""
    return {
        "harness": {"name": harness},
        "rollout": {"max_output_tokens": 64, "calls": 8, "sampled_tokens": 1024, "agent_timeout": 60.0},
        "run": {"concurrency": 4},
        # Muon in both stages: with some hundred updates in all, AdamW has moved such a small model too little.
        "sft": {
            "steps": 80,
            "learner": {
                "optimizer": {"kind": "muon", "lr": 4e-3, "warmup_steps": 10, "decay": "linear", "decay_start": 0.0}
            },
        },
        "train": {
            "steps": 37,
            "groups_per_step": 8,
            "learner": {"optimizer": {"kind": "muon", "lr": 1e-3, "warmup_steps": 4}},
        },
    }
