"""Names for files, folders and contents, and the rule that keeps some combinations out of training.

Single nouns are shared by all splits: a tied-embedding model of this size cannot act on a token that
its training never made it emit. What is held out is therefore the *combination* of names in a task.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random

NOUNS: tuple[str, ...] = (
    "apple", "arm", "bag", "ball", "band", "bank", "barn", "bean", "bear", "bed", "bell", "bike",
    "bird", "boat", "bone", "book", "boot", "bowl", "box", "bread", "brick", "bus", "cake", "camp",
    "card", "cart", "cat", "chair", "clock", "cloud", "coat", "coin", "cook", "corn", "cow", "crab",
    "crow", "cup", "desk", "dish", "dog", "door", "dress", "drum", "duck", "egg", "farm", "field",
    "fish", "flag", "fork", "fox", "frog", "gate", "girl", "goat", "gold", "grass", "hand", "hat",
    "hill", "horse", "house", "iron", "jar", "key", "king", "kite", "lake", "lamp", "leaf", "lion",
    "map", "milk", "moon", "mouse", "nail", "nest", "ocean", "onion", "pear", "pen", "pig", "plant",
    "pond", "queen", "rain", "ring", "river", "road", "rock", "rose", "sand", "seed", "ship", "shoe",
)  # fmt: skip
"""96 short nouns; each is one token of the demo's tokenizer."""

EXTENSIONS: tuple[str, ...] = ("txt", "md", "log", "csv", "cfg", "dat")

POOLS: dict[str, range] = {"train": range(14), "validation": range(14, 16), "heldout": range(16, 20)}
"""Twentieths of the space of name combinations that each pool may draw from."""

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"


def syllable_name(rng: Random) -> str:
    """A made-up name of two or three syllables (pre-training only; several tokens long)."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3))))


def pool_of(family: str, names: Sequence[str]) -> str:
    """The pool that a combination of names belongs to, by a hash that every machine agrees on."""
    place = zlib.crc32("/".join((family, *names)).encode()) % 20
    return next(pool for pool, twentieths in POOLS.items() if place in twentieths)


class Draw:
    """Distinct nouns, file names and texts for one task, from one random source."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def noun(self) -> str:
        """A noun that this task does not use yet."""
        while (word := self.rng.choice(NOUNS)) in self._used:
            pass
        self._used.add(word)
        return word

    def nouns(self, count: int) -> list[str]:
        """`count` nouns that this task does not use yet."""
        return [self.noun() for _ in range(count)]

    def file(self, extension: str | None = None) -> str:
        """A file name: an unused noun and an extension."""
        return f"{self.noun()}.{extension or self.rng.choice(EXTENSIONS)}"

    def lines(self, count: int) -> str:
        """A text of `count` lines, one unused noun each."""
        return "".join(f"{word}\n" for word in self.nouns(count))
