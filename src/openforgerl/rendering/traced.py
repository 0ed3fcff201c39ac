"""A string that knows, character by character, who wrote it: the template, a message, or nobody known.

Structure must be *proven* to be the template's. So template literals enter as `TEMPLATE`, conversation data
as the index of its message (or `OUTSIDE` for tools and template arguments), and whatever an operation yields
that is not followed here is a plain `str`, which counts as `UNKNOWN`, never as the template's.
"""

# str's own methods have LiteralString overloads that no override can repeat without repeating them all.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

TEMPLATE = -1
"""Written by the chat template itself, or a special token that the tokenizer's configuration names."""
UNKNOWN = -2
"""An operation that is not followed made it; treated as data unless the data cannot have made it."""
OUTSIDE = -3
"""Data that belongs to no message: tool schemas and template arguments."""

Runs = tuple[tuple[int, int], ...]
"""(length, origin) in order; lengths above 0; neighbours differ in origin."""

_PLACEHOLDERS = range(0xF0000, 0xFFFFE)
"""Private-use characters that stand for traced ones while Python formats a string."""


class Traced(str):
    """A `str` with origins. Equal to, hashed and printed as the plain string of the same characters."""

    __slots__ = ("_runs",)
    _runs: Runs

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> str:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: Any) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return concat([self] * count.__index__())

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = operator.index(key)  # a TypeError for other keys, as str raises it: jinja asks for attributes so
            index += len(self) if index < 0 else 0
            return make(str.__getitem__(self, key), ((1, origin_at(self, index)),))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        return make(str.__getitem__(self, key), _compress(expand(self)[key]))

    def __iter__(self) -> Iterator[str]:
        origins = expand(self)
        return iter([make(char, ((1, origins[i]),)) for i, char in enumerate(str.__str__(self))])

    def _cut(self, start: int, stop: int) -> Traced:
        text = str.__getitem__(self, slice(start, stop))
        if len(self._runs) == 1:
            return uniform(text, self._runs[0][1])
        runs: list[tuple[int, int]] = []
        at = 0
        for length, origin in self._runs:
            low, high = max(at, start), min(at + length, stop)
            if low < high:
                runs.append((high - low, origin))
            at += length
            if at >= stop:
                break
        return make(text, tuple(runs))

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._cut(start, start + len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix) if str.startswith(self, prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of a split, each with its origins. They stand in order, so each is found after the last."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            start = at if sep is not None else str.find(self, piece, at)
            found.append(self._cut(start, start + len(piece)))
            at = start + len(piece) + (len(sep) if sep is not None else 0)
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        found: list[str] = []
        at = 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            found.append(self._cut(at, at + len(line)))
            at += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(len(str.partition(self, sep)[0]), sep, missing_left=False)

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(len(str.rpartition(self, sep)[0]), sep, missing_left=True)

    def _parted(self, at: int, sep: str, *, missing_left: bool) -> tuple[str, str, str]:
        nothing = make("", ())
        if sep not in self:
            return (nothing, nothing, self) if missing_left else (self, nothing, nothing)
        return self._cut(0, at), self._cut(at, at + len(sep)), self._cut(at + len(sep), len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return self._whole(str.replace(self, old, new, count), new)
        return join(new, self.split(old, count))

    def join(self, iterable: Iterable[str], /) -> str:
        return join(self, iterable)

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def swapcase(self) -> str:
        return self._recased(str.swapcase(self))

    def casefold(self) -> str:
        return self._recased(str.casefold(self))

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._whole(str.center(self, width, fillchar), fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._whole(str.ljust(self, width, fillchar), fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._whole(str.rjust(self, width, fillchar), fillchar)

    def zfill(self, width: SupportsIndex, /) -> str:
        return self._whole(str.zfill(self, width))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        return self._whole(str.expandtabs(self, tabsize))

    def _recased(self, text: str) -> Traced:
        # Changing case only ever lengthens a string, so equal length means character by character.
        return make(text, self._runs) if len(text) == len(self) else self._whole(text)

    def _whole(self, text: str, *others: str) -> Traced:
        return uniform(text, least_trusted((self, *others)))


def make(text: str, runs: Runs) -> Traced:
    """A traced string from its characters and runs (which must cover them)."""
    traced = str.__new__(Traced, text)
    traced._runs = runs  # pyright: ignore[reportPrivateUsage]  # the class's own constructor
    return traced


def uniform(text: str, origin: int) -> Traced:
    """`text` as written by one origin."""
    return make(text, ((len(text), origin),) if text else ())


def runs_of(text: str) -> Runs:
    """The runs of any string; a plain one is `UNKNOWN`."""
    if isinstance(text, Traced):
        return text._runs  # pyright: ignore[reportPrivateUsage]  # templates must not see it, this module may
    return ((len(text), UNKNOWN),) if text else ()


def expand(text: str) -> list[int]:
    """One origin per character."""
    return [origin for length, origin in runs_of(text) for _ in range(length)]


def expand_part(runs: Runs, starts: Sequence[int], start: int, stop: int) -> list[int]:
    """One origin per character of `[start, stop)`; `starts` says where each run begins."""
    found: list[int] = []
    at = max(bisect_right(starts, start) - 1, 0)
    while at < len(runs) and starts[at] < stop:
        length, origin = runs[at]
        found += [origin] * (min(stop, starts[at] + length) - max(start, starts[at]))
        at += 1
    return found


def origin_at(text: str, index: int) -> int:
    """The origin of one character."""
    at = 0
    for length, origin in runs_of(text):
        at += length
        if index < at:
            return origin
    raise IndexError(index)


def least_trusted(texts: Iterable[str]) -> int:
    """The origin that a mixture of `texts` must be given: data before unknown before template."""
    found = {origin for text in texts for _, origin in runs_of(text)}
    data = found - {TEMPLATE, UNKNOWN}
    if data:
        return max(data)
    return UNKNOWN if UNKNOWN in found else TEMPLATE


def concat(values: Iterable[str]) -> Traced:
    """All strings joined; what jinja calls to end a template, macro or block."""
    parts = list(values)
    runs: list[tuple[int, int]] = []
    held, last = 0, TEMPLATE  # the run that may still grow
    for part in parts:
        # A prompt has some ten thousand parts.
        for length, origin in part._runs if type(part) is Traced else runs_of(part):  # pyright: ignore[reportPrivateUsage]
            if origin == last:
                held += length
                continue
            if held:
                runs.append((held, last))
            held, last = length, origin
    if held:
        runs.append((held, last))
    return make("".join(parts), tuple(runs))


def join(separator: str, items: Iterable[Any]) -> Traced:
    """`separator.join(items)` with origins; raises TypeError for items that are not strings, as str does."""
    parts: list[str] = []
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(f"sequence item {index}: expected str instance, {type(item).__name__} found")
        if index:
            parts.append(separator)
        parts.append(item)
    return concat(parts)


def formatted(
    pattern: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    apply: Callable[[str, tuple[Any, ...], dict[str, Any]], str],
) -> Traced:
    """`apply(pattern, args, kwargs)` (`%` or `format`) with origins.

    Every character of a string argument is replaced by a private-use character, formatted, and put back;
    what is left was the pattern's. If that cannot be done (objects, too long, `!r`), the least trusted origin
    of all that went in holds for the whole.
    """
    plain = str.__str__(apply(_plain(pattern), tuple(args), dict(kwargs)))
    values = [*args, *kwargs.values()]
    strings = [value for value in values if isinstance(value, str)]
    simple = all(value is None or isinstance(value, str | int | float) for value in values)
    worst = least_trusted((pattern, *strings)) if simple else least_trusted((pattern, " ", *strings))
    total = sum(map(len, strings))
    pattern_runs = runs_of(pattern)
    # Arguments are hidden whole, so only the pattern's own characters could be taken for placeholders.
    clear = len(pattern_runs) <= 1 and not any(ord(char) in _PLACEHOLDERS for char in pattern)
    if not simple or not clear or total > len(_PLACEHOLDERS):
        return uniform(plain, worst)
    shown: list[tuple[str, int]] = []

    def hide(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        start = _PLACEHOLDERS.start + len(shown)
        shown.extend(zip(_plain(value), expand(value), strict=True))
        return "".join(chr(start + i) for i in range(len(value)))

    hidden = apply(_plain(pattern), tuple(map(hide, args)), {name: hide(value) for name, value in kwargs.items()})
    base = pattern_runs[0][1] if pattern_runs else TEMPLATE
    pairs = [shown[ord(c) - _PLACEHOLDERS.start] if ord(c) in _PLACEHOLDERS else (c, base) for c in hidden]
    text = "".join(char for char, _ in pairs)
    return make(text, _compress([origin for _, origin in pairs])) if text == plain else uniform(plain, worst)


def _plain(text: str) -> str:
    return str.__str__(text)


def _compress(origins: Iterable[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for origin in origins:
        if runs and runs[-1][1] == origin:
            runs[-1] = (runs[-1][0] + 1, origin)
        else:
            runs.append((1, origin))
    return tuple(runs)
