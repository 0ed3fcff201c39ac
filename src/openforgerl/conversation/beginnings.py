"""What comes again from its beginning. Every request of a session brings the whole history, and a turn more.

So what was made of each item of a list can mostly be used again: for the items at the beginning that are the very same
objects as last time. Only identity counts here. Equal is not enough (`1 == True`, and objects of JSON compare without
the order of their keys), and comparing costs what reading costs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class Beginnings(Generic[T, V]):
    """The lists seen last, with what was made of each item. Safe to ask from several threads."""

    def __init__(self, held: int = 4) -> None:
        """`held`: how many lists; a session may carry a few conversations at once. The newest stand first."""
        self._held = held
        self._lists: tuple[tuple[Sequence[T], Sequence[V]], ...] = ()

    def known(self, items: Sequence[T]) -> list[V]:
        """What was made of the items that `items` begins with, as far as any list goes that begins so too."""
        best: Sequence[V] = ()
        longest = 0
        for seen, values in self._lists:
            if seen and items and seen[0] is items[0]:
                common = common_beginning(seen, items)
                if common > longest:
                    longest, best = common, values
        return list(best[:longest])

    def keep(self, items: Sequence[T], values: Sequence[V]) -> None:
        """Remember what was made of each of `items`. It takes the place of a list that it only goes on from."""
        if not items or not self._held:
            return
        others = [pair for pair in self._lists if common_beginning(pair[0], items) < len(pair[0])]
        self._lists = ((items, values), *others[: self._held - 1])

    def clear(self) -> None:
        """Forget all."""
        self._lists = ()


def common_beginning(left: Sequence[object], right: Sequence[object]) -> int:
    """How many items at the beginning are the same objects."""
    same = list(map(operator.is_, left, right))
    return same.index(False) if False in same else len(same)
