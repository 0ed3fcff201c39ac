"""The demo's config: the rooms' options with the values that fit two cores and a quarter of an hour."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from openforgerl.config import RoomsConfig
from openforgerl.demo.families import HELD_OUT_FAMILIES, TRAINING_FAMILIES
from openforgerl.orchestrator import RunOptions
from openforgerl.training.options import GrpoOptions, SftOptions

SYSTEM_PROMPT = "You are an agent in a Linux terminal. Use the tools to do the task. Then say Done."
SMALL_HARNESSES: Mapping[str, dict[str, Any]] = {
    "codex": {
        "codex": {
            "subagents": False,
            "features": {"goals": False, "view_image": False},
            "extra_arguments": [
                *("-c", f"instructions={json.dumps(SYSTEM_PROMPT)}"),
                *("-c", "skills.include_instructions=false"),
                *("-c", "include_environment_context=false"),  # it holds the date: another prompt every day
                *("-c", "include_permissions_instructions=false"),
                *("-c", "tools.experimental_request_user_input.enabled=false"),
            ],
        }
    },
    "claude-code": {
        "claude_code": {
            "bare": True,
            "subagents": False,
            "extra_arguments": ["--tools", "Bash", "--system-prompt", SYSTEM_PROMPT],
        }
    },
}
"""Harnesses that the demo's base model never saw, with their own settings for a short prompt. As shipped, the first
request takes 14,500 (codex, quiet) and 2,100 (Claude Code, `--bare`) of the demo model's tokens, and its context holds
4,096; so set, it takes about 1,430 and 1,070, nearly all of them the tools' descriptions."""

SMALL_CONTEXTS: Mapping[str, int | None] = {
    "codex": None,
    # Told of 4,096, Claude Code begins to summarise after one turn, and asking for the summary takes 5,300.
    "claude-code": 32_768,
}
"""Harness → `demo.context_length`."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how much of each stage."""

    model: str | None = None
    """Directory of another model to start from; null = the one that ships, which the demo's default sizes are for."""
    teacher_rollouts: int = 3
    """Teacher rollouts per SFT task; successes are kept (the paper's recipe)."""
    eval_attempts: int = 3
    """Attempts per held-out task and stage: pass@3 and pass^3 need three."""
    eval_tasks: int | None = None
    """Held-out tasks of each split that are measured; null = all."""
    eval_per_family: int | None = None
    """Held-out tasks of each family and split that are measured; null = all."""
    families: tuple[str, ...] = ()
    """Families that are taught, trained on and measured; empty = all."""
    lent_per_family: int = 0
    """Tasks of each family that the teacher shows instead of GRPO's using them, so that SFT has more to learn from."""
    context_length: int | None = None
    """Tokens that the shipped model's context is served with; null = as shipped (4096). Its positions are rotary and go
    on further, but it never saw so long a text."""
    sft_tasks: int | None = None
    """Tasks that the teacher shows; null = all of the sft split."""
    validation_tasks: int | None = None
    """Tasks that SFT is validated on; null = all of the validation split."""

    def __post_init__(self) -> None:
        if self.teacher_rollouts < 1:
            raise ValueError(f"teacher_rollouts must be 1 or more; got {self.teacher_rollouts}")
        if self.eval_attempts < 3:
            raise ValueError(f"eval_attempts must be 3 or more, for pass@3 and pass^3; got {self.eval_attempts}")
        if self.lent_per_family < 0:
            raise ValueError(f"lent_per_family must be 0 or more; got {self.lent_per_family}")
        for name in ("eval_tasks", "eval_per_family", "sft_tasks", "validation_tasks", "context_length"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
        if self.model is not None and self.context_length is not None:
            raise ValueError("context_length is for the model that ships; for another set engine.context_length")
        known = (*TRAINING_FAMILIES, *HELD_OUT_FAMILIES)
        if unknown := [family for family in self.families if family not in known]:
            raise ValueError(f"families must be among {', '.join(known)}; got {', '.join(unknown)}")


class DemoConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the demo does follows from this and the package's own files."""

    run: RunOptions = RunOptions()
    demo: DemoOptions = DemoOptions()
    sft: SftOptions = SftOptions()
    train: GrpoOptions = GrpoOptions()


def small_note(config: DemoConfig) -> str:
    """What a small demo shows and what it does not; empty for a full one."""
    if config.harness.name not in SMALL_HARNESSES:
        return ""
    families = ", ".join(config.demo.families) or "all"
    return (
        f"A small run: {config.train.steps} GRPO steps, tasks of the families {families}. It shows that every stage "
        "runs through this harness token by token, not what training in it can reach: the base model was made for "
        "another harness's prompt, and so few steps and tasks can't tell a gain from chance."
    )


def demo_defaults(harness: str) -> dict[str, Any]:
    """What the demo sets before a person's own settings."""
    return _small(harness) if harness in SMALL_HARNESSES else _full(harness)


def _full(harness: str) -> dict[str, Any]:
    return {
        "harness": {"name": harness},
        "rollout": {"max_output_tokens": 64, "calls": 8, "sampled_tokens": 1024, "agent_timeout": 60.0},
        "run": {"concurrency": 4},
        # Muon in both stages: with some hundred updates in all, AdamW has moved such a small model too little.
        "sft": {
            "steps": 90,
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


def _small(harness: str) -> dict[str, Any]:
    """Tool lists ten times as long as pi's, and heavier programs: enough to see every stage work, and no more."""
    return {
        "harness": {"name": harness, **SMALL_HARNESSES[harness]},
        # The time limit is for a busy machine; alone, an attempt takes a few seconds.
        "rollout": {"max_output_tokens": 64, "calls": 8, "sampled_tokens": 1024, "agent_timeout": 300.0},
        "run": {"concurrency": 4},
        "demo": {
            "teacher_rollouts": 1,
            "eval_per_family": 1,  # of each of two splits: new parameters, new wording
            "families": ["copy", "delete", "rename", "sort"],
            "lent_per_family": 6,
            "context_length": SMALL_CONTEXTS[harness],
        },
        "sft": {
            "steps": 120,
            "learner": {
                "optimizer": {"kind": "muon", "lr": 4e-3, "warmup_steps": 10, "decay": "linear", "decay_start": 0.0}
            },
        },
        "train": {
            "steps": 3,
            "groups_per_step": 4,
            "learner": {"optimizer": {"kind": "muon", "lr": 1e-3, "warmup_steps": 1}},
        },
    }
