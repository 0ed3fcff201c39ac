"""Collecting beside training: the groups of the next steps, begun as early as their limit of staleness lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class StepsAhead(Generic[T]):
    """Hands out what `collect(step)` gives, for one step after the other up to `last`.

    When step `s` is asked for, the weights that it starts from are served; the `limit` steps after it may start under
    them too, and do. What would be staler does not start before its turn. `aclose` ends what is under way.
    """

    collect: Callable[[int], Awaitable[T]]
    limit: int
    last: int
    _under_way: dict[int, asyncio.Task[T]] = field(default_factory=dict[int, asyncio.Task[T]])

    async def of(self, step: int) -> T:
        """What was collected for `step`, which is the next one. Raises what its collecting raised."""
        for begun in range(step, min(step + self.limit, self.last) + 1):
            if begun not in self._under_way:
                self._under_way[begun] = asyncio.create_task(self._collected(begun))
        # Shielded, so that a cancellation reaches all steps at once, in `aclose`: each may take its time to drain.
        collected = await asyncio.shield(self._under_way[step])
        del self._under_way[step]
        return collected

    async def _collected(self, step: int) -> T:
        return await self.collect(step)

    async def aclose(self) -> None:
        """Cancel what is under way and wait for its end."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._under_way.clear()
