"""How many attempts run at once and how failures are refilled."""

from __future__ import annotations

import msgspec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a run of many attempts."""

    concurrency: int = 2
    """Attempts in flight at once. A Node harness costs about one CPU second, so more than the cores gains nothing."""
    refill_limit: int | None = None
    """Failed attempts replaced per group before the group is dropped and counted; None = the group's size."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more; got {self.concurrency}")
        if self.refill_limit is not None and self.refill_limit < 0:
            raise ValueError(f"refill_limit must be 0 or more; got {self.refill_limit}")
