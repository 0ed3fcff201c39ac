"""What `train sft` and `train grpo` are configured with, whichever trainer does it. Light: no torch, no veRL."""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.config import RoomsConfig
from openforgerl.orchestrator import RunOptions
from openforgerl.training.options import GrpoOptions, SftOptions
from openforgerl.types import JsonValue

Trainer = Literal["embedded", "verl"]
"""Who makes optimizer steps: our own learner on this machine, or veRL (docs/verl.md)."""


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`openforgerl train sft`."""

    sft: SftOptions = SftOptions()
    validation_share: float = 0.1
    """Share of the tasks whose successes are kept for validation (at least one task)."""
    seed: int = 0
    """Which tasks those are."""
    trainer: Trainer = "embedded"
    """`embedded`: our learner; `verl`: veRL's SFT trainer, in veRL's environment."""
    verl: dict[str, JsonValue] = msgspec.field(default_factory=dict[str, JsonValue])
    """veRL's own options, as its configuration nests them; they win over ours and veRL checks them."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share must be between 0 and 1; got {self.validation_share}")


class GrpoConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`openforgerl train grpo`."""

    run: RunOptions = RunOptions()
    train: GrpoOptions = GrpoOptions()
    trainer: Trainer = "embedded"
    """`embedded`: our learner on this machine; `verl`: veRL, in veRL's environment."""
    verl: dict[str, JsonValue] = msgspec.field(default_factory=dict[str, JsonValue])
    """veRL's own options, as its configuration nests them; they win over ours and veRL checks them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer == "verl" and self.train.max_staleness:
            raise ValueError(
                "train.max_staleness is the embedded trainer's; with veRL, rollouts run ahead by veRL's own options "
                "(docs/verl.md)"
            )
