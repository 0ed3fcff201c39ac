"""Who may start an attempt, and when: places, their order, and what holds them back."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from openforgerl.orchestrator.options import RunOptions

LOOK_AGAIN = 0.25
"""Seconds until a full engine is looked at again: it tells nobody when its queue gets shorter."""

Order = tuple[int, ...]
"""(training step, group's place in the plan, rollout's place in its group); the least goes first."""


@dataclass(order=True, slots=True)
class _Waiting:
    order: Order
    number: int
    """Breaks ties: first come, first served."""
    granted: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class Places:
    """Places for `options.concurrency` attempts, given in plan order.

    Groups are kept together: a refill of an early group goes before the first attempt of a later one, so groups
    complete one after another and a stop loses little. An attempt whose harness has no place free does not hold up
    those of other harnesses. `load` says how many model calls are under way now.
    """

    options: RunOptions
    load: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, list[_Waiting]] = field(default_factory=dict[str, list[_Waiting]])
    """Harness → heap of those who wait for a place."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _taken: Counter[str] = field(default_factory=Counter[str])
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    _next_start: float = 0.0
    _alarm: asyncio.TimerHandle | None = None
    _paused: bool = False

    @property
    def taken(self) -> int:
        """Attempts in flight."""
        return self._taken.total()

    @asynccontextmanager
    async def place(self, harness: str, order: Order) -> AsyncGenerator[float]:
        """Hold a place for one attempt; yields the seconds waited for it."""
        began = self.clock()
        waiting = _Waiting(order, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting.setdefault(harness, []), waiting)
        self._admit()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            # Granted in the very moment in which its taker was cancelled, or still in a heap (and skipped there).
            if waiting.granted.done() and not waiting.granted.cancelled():
                self._leave(harness)
            raise
        try:
            yield self.clock() - began
        finally:
            self._leave(harness)

    @contextmanager
    def held(self, harness: str) -> Generator[None]:
        """The place of an attempt that is at work already: it is counted, whatever the limits, and waits for none."""
        self._taken[harness] += 1
        try:
            yield
        finally:
            self._leave(harness)

    def pause(self) -> None:
        """Start nothing more until `resume`: a weight update, or the end of the run. What runs goes on."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._admit()

    async def emptied(self) -> None:
        """Wait until nothing is in flight."""
        while self.taken:
            self._empty.clear()
            await self._empty.wait()

    def _leave(self, harness: str) -> None:
        self._taken[harness] -= 1
        if not self.taken:
            self._empty.set()
        self._admit()

    def _admit(self) -> None:
        """Give places to those who wait, as far as the limits go."""
        while not self._paused and self.taken < self.options.concurrency:
            harness = self._next_harness()
            if harness is None:
                return
            wait = self._held()
            if wait > 0:
                self._look_again(wait)
                return
            if self.options.starts_per_second is not None:
                # Not saved up while nothing started: a burst afterwards is what the limit is against.
                self._next_start = max(self._next_start, self.clock()) + 1 / self.options.starts_per_second
            self._taken[harness] += 1
            heapq.heappop(self._waiting[harness]).granted.set_result(None)

    def _next_harness(self) -> str | None:
        """The harness of the first in order among those that may have another place."""
        first: tuple[_Waiting, str] | None = None
        for harness, heap in self._waiting.items():
            while heap and heap[0].granted.done():
                heapq.heappop(heap)  # cancelled
            most = self.options.per_harness.get(harness, self.options.concurrency)
            if heap and self._taken[harness] < most and (first is None or heap[0] < first[0]):
                first = (heap[0], harness)
        return None if first is None else first[1]

    def _held(self) -> float:
        """Seconds until the next start may be; 0 = now."""
        options = self.options
        # With nothing in flight of ours, calls of others must not hold the run for ever.
        if options.hold_at_calls is not None and self.taken and self.load() >= options.hold_at_calls:
            return LOOK_AGAIN
        return 0.0 if options.starts_per_second is None else max(0.0, self._next_start - self.clock())

    def _look_again(self, seconds: float) -> None:
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(seconds, self._rung)

    def _rung(self) -> None:
        self._alarm = None
        self._admit()
