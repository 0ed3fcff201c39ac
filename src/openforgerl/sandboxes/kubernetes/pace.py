"""How fast pods are asked for, and who is asked for next where there is no room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque


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


class Room:
    """Who waits for room that only a pod's end can give. One end wakes one: all would ask for the same place."""

    def __init__(self) -> None:
        self._first: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    async def wait(self, seconds: float, *, first: bool) -> None:
        """Until it is one's turn, or for `seconds`. `first`: before all that are not."""
        line = self._first if first else self._others
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await turn
        finally:
            if turn in line:
                line.remove(turn)

    def freed(self) -> None:
        """A pod has gone."""
        for line in (self._first, self._others):
            while line:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
