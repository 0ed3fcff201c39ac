"""What can go wrong with the API server itself. Every field is a switch that tests may turn at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Faults:
    """Seconds are real ones."""

    gone_as: Literal["event", "status"] = "event"
    """How a watch from a version that is gone is told: an ERROR event in a 200 stream, or HTTP 410."""
    unset_version_is_504: bool = False
    """A watch without resourceVersion is told `Too large resource version` (an old etcd, just after its start)."""
    most_in_flight: int = 0
    """Above so many requests at once, who is no master gets the text 429; watches do not count. 0: no bound."""
    throttle_rate: float = 0.0
    """Share of requests, watches too, that get the text 429. Masters never do."""
    error_rate: float = 0.0
    """Share of requests that get a 500 of etcd's before anything happens."""
    retry_after: int = 1
    latency: float = 0.0
    """Added before every answer."""
    watch_delay: float = 0.0
    """By which every event comes late to every watch."""
    lost_event_rate: float = 0.0
    """Share of events that no watch sees."""
    bookmark_every: float = 60.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def strikes(self, rate: float) -> bool:
        """Whether something of that share happens now."""
        return rate > 0 and self.random.random() < rate
