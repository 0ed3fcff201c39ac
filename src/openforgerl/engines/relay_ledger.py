"""What was asked of an upstream, and what it cost."""

from __future__ import annotations

import msgspec

from openforgerl.engines.options import RelayOptions
from openforgerl.types import Usage

MILLION = 1_000_000


class RelayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the engine was opened. Every call ends as answered, failed or stopped."""

    answered: int = 0
    failed: int = 0
    stopped: int = 0
    """The client left, a stop string came, or the session ended: the upstream's answer was not read to its end."""
    requests: int = 0
    """Sent to the upstream, retries included."""
    retries: int = 0
    without_usage: int = 0
    """Answers, whole or begun, whose tokens are not known and not counted here: the bill may be higher."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_written_tokens: int = 0
    cost: float | None = None
    """In the currency of the prices; None when no prices are set."""

    def line(self) -> str:
        """All of it for a log."""
        spent = "" if self.cost is None else f", cost {self.cost:.4f}"
        unknown = f" ({self.without_usage} answers without usage)" if self.without_usage else ""
        return (
            f"{self.answered} answered, {self.failed} failed, {self.stopped} stopped; {self.requests} requests, "
            f"{self.retries} of them retries; {self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), "
            f"{self.completion_tokens} answer tokens{unknown}{spent}"
        )


class Ledger:
    """Keeps the account."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        priced = options.price_in is not None and options.price_out is not None
        self.stats = RelayStats(cost=0.0 if priced else None)

    def count(self, **more: int) -> None:
        """Add to the counters of these names."""
        self.stats = msgspec.structs.replace(
            self.stats, **{name: getattr(self.stats, name) + value for name, value in more.items()}
        )

    def bill(self, usage: Usage | None) -> Usage | None:
        """Count the tokens of one answer; its usage with its cost."""
        if usage is None:
            self.count(without_usage=1)
            return None
        self.count(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            cache_written_tokens=usage.cache_written_tokens,
        )
        cost = self._cost(usage)
        if cost is not None:
            self.stats = msgspec.structs.replace(self.stats, cost=(self.stats.cost or 0.0) + cost)
        return msgspec.structs.replace(usage, cost=cost)

    def _cost(self, usage: Usage) -> float | None:
        options = self._options
        if options.price_in is None or options.price_out is None:
            return None
        cached = options.price_in if options.price_cached is None else options.price_cached
        written = options.price_in if options.price_cache_write is None else options.price_cache_write
        plain = max(0, usage.prompt_tokens - usage.cached_tokens - usage.cache_written_tokens)
        return (
            plain * options.price_in
            + usage.cached_tokens * cached
            + usage.cache_written_tokens * written
            + usage.completion_tokens * options.price_out
        ) / MILLION
