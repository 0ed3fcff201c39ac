"""Settings of how samples are made from trajectories."""

from __future__ import annotations

import msgspec

from openforgerl.types import ThreadRole


class SamplePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the sampled tokens train."""

    train_roles: tuple[ThreadRole, ...] = (ThreadRole.MAIN, ThreadRole.SUBAGENT, ThreadRole.COMPACTION)
    """Threads with these roles train, the others are masked. Side requests and unattributed calls are not what the
    task rewards, so they are out by default."""
    max_staleness: int | None = None
    """Weights versions a token may be behind the trainer's; older ones are masked. None = any."""
    max_row_tokens: int | None = None
    """Ids of a training row at most; a longer row is dropped whole and counted. None = any length. Cutting a row
    instead would train on the beginning of attempts only, and hide it."""

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, or null; got {self.max_staleness}")
        if self.max_row_tokens is not None and self.max_row_tokens < 1:
            raise ValueError(f"max_row_tokens must be 1 or more, or null; got {self.max_row_tokens}")
