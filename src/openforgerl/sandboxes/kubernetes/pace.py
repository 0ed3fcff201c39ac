"""How fast pods are asked for."""

from __future__ import annotations

import asyncio
import time


class TokenBucket:
    """`rate` turns a second on average, `burst` at once. First come, first served."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = time.monotonic()
        self._line = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a turn."""
        async with self._line:
            now = time.monotonic()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            self._tokens -= 1.0
            if self._tokens < 0.0:
                await asyncio.sleep(-self._tokens / self._rate)
