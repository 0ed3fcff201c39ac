"""How many attempts run at once, when the next one may start, and how failures are refilled."""

from __future__ import annotations

import msgspec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a run of many attempts."""

    concurrency: int = 2
    """Attempts in flight at once. On one machine a Node harness costs about one CPU second, so more than the cores
    gains nothing there."""
    per_harness: dict[str, int] = {}
    """Harness → its attempts in flight at once, where that is less than `concurrency`."""
    starts_per_second: float | None = None
    """Most attempts started in a second, on average: what a cluster's scheduler or a registry can bear. None = any."""
    hold_at_calls: int | None = None
    """Start nothing new while so many model calls are under way: the engine's queue is full enough. None = never."""
    refill_limit: int | None = None
    """Failed attempts replaced per group before the group is dropped and counted; None = the group's size."""
    stop_after: int | None = 20
    """End the run when so many attempts in a row failed in the same way, none of them by the model: what is broken
    would waste the rest. The same command goes on once it is mended. None = never."""
    drain_seconds: float = 0.0
    """Seconds that attempts in flight get to finish when the run is interrupted; 0 = cancelled at once (they are run
    again by the next start)."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more; got {self.concurrency}")
        for name, value in self.per_harness.items():
            if value < 1:
                raise ValueError(f"per_harness.{name} must be 1 or more; got {value}")
        if self.refill_limit is not None and self.refill_limit < 0:
            raise ValueError(f"refill_limit must be 0 or more; got {self.refill_limit}")
        for name in ("hold_at_calls", "stop_after"):
            count: int | None = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be 1 or more; got {count}")
        if self.starts_per_second is not None and not self.starts_per_second > 0:
            raise ValueError(f"starts_per_second must be above 0; got {self.starts_per_second}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ValueError(f"drain_seconds must be 0 or more; got {self.drain_seconds}")
