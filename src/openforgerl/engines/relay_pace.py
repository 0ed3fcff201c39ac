"""How many requests go to an upstream at once and in a minute, and when to try again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from openforgerl.engines.options import RelayOptions
from openforgerl.engines.relay_faults import Fault, OutOfTime
from openforgerl.errors import EngineOverloaded

MINUTE = 60.0


class Pace:
    """Places for requests. Waiting is in order of arrival."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        self._places = asyncio.Semaphore(options.concurrent)
        self._turn = asyncio.Lock()
        self._sent: deque[float] = deque()
        """When the requests of the last minute were sent, in seconds of the monotonic clock."""
        self._not_before = 0.0
        self._random = random.Random()

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncGenerator[None]:
        """Wait for a place, at most `seconds`, then hold it.

        Raises OutOfTime after waiting in vain, and a Fault at once where waiting would be in vain.
        """
        held = self._not_before - time.monotonic()
        if held > seconds:
            busy = EngineOverloaded(f"the upstream asked for a pause of {held:.0f} s more", retry_after=held)
            raise Fault(busy, again=False, wait=held)
        ends = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(ends):
                await self._places.acquire()
        except TimeoutError:
            raise OutOfTime from None
        try:
            try:
                async with asyncio.timeout_at(ends):
                    await self._wait_for_turn()
            except TimeoutError:
                raise OutOfTime from None
            yield
        finally:
            self._places.release()

    def hold(self, seconds: float) -> None:
        """Send nothing for so long: the upstream told one of our requests to wait, and it means all of them."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def backoff(self, attempt: int, asked: float | None) -> float:
        """Seconds to wait before retry number `attempt` (0 = the first): what was asked for, or more, with jitter."""
        options = self._options
        own = min(options.max_backoff_s, options.backoff_s * 2 ** min(attempt, 30)) * self._random.uniform(0.5, 1.0)
        return max(own, asked or 0.0)

    async def _wait_for_turn(self) -> None:
        async with self._turn:
            while (wait := self._wait()) > 0:  # noqa: ASYNC110  (the wait is known, but may grow meanwhile)
                await asyncio.sleep(wait)
            self._sent.append(time.monotonic())

    def _wait(self) -> float:
        """Seconds until a request may be sent, as things stand."""
        now = time.monotonic()
        while self._sent and self._sent[0] <= now - MINUTE:
            self._sent.popleft()
        most = self._options.requests_per_minute
        full = most is not None and len(self._sent) >= most
        return max(self._not_before - now, self._sent[0] + MINUTE - now if full else 0.0)
