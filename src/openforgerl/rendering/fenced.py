"""Calls whose parts stand between tokens of their own: the reading that DeepSeek V3, R1 and Kimi K2 share.

::

    block = open { begin head separator arguments end } close

* Arguments are the text between the separator and the `end` outside JSON strings, without white space around it
  (and without the fence around it, for forms that fence). They are never repaired.
* A call without a usable head is dropped with its block; a block without any call stays text, markers included.
"""

from __future__ import annotations

import msgspec

from openforgerl.rendering.answers import Reading, Style
from openforgerl.rendering.json_text import JsonScan

_WHITE = " \t\r\n"


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one family."""

    open: str
    begin: str
    separator: str
    end: str
    close: str
    fenced: bool = False
    """Whether the name follows the separator on a line of its own, and arguments stand in a ```json fence."""
    prefix: str = ""
    """What a head has before the name, with a number after a colon behind it (Kimi's ids)."""


class FenceGrammar(Reading):
    """Reads one answer with fenced calls."""

    def __init__(self, style: Style, *, fence: Fence, thought_open: bool, seed: str) -> None:
        super().__init__(style, opens=(fence.open,), thought_open=thought_open, seed=seed)
        self._fence = fence
        self._scan = JsonScan(fence.end)
        self._closing = _WHITE + ("`" if fence.fenced else "")
        self._before = ""  # what was read of a block that has no call yet
        self._opened = False  # whether the fence before the arguments was read
        self._argued = False  # whether arguments have begun
        self._seen = 0

    def _enter(self, marker: str) -> None:
        self._before = marker
        self._seen = 0
        self._step = self._block

    def _grown(self) -> bool:
        """Whether there is text that was not looked at."""
        seen, self._seen = self._seen, len(self._rest)
        return self._seen > seen

    def _block(self, final: bool) -> bool:
        """Between calls."""
        if not self._grown() and not final:
            return False
        begin, close = self._rest.find(self._fence.begin), self._rest.find(self._fence.close)
        if begin >= 0 and (close < 0 or begin < close):
            at = begin + len(self._fence.begin)
            self._before += self._rest[:at] if self._before else ""
            self._rest = self._rest[at:]
            self._seen = 0
            self._step = self._head
            return True
        if close < 0 and not final:
            return False
        stop = len(self._rest) if close < 0 else close + len(self._fence.close)
        whole, self._rest = self._rest[:stop], self._rest[stop:]
        if self._before:
            self._block_is_text(self._before + whole)
        else:
            self._block_ends()
        return True

    def _head(self, final: bool) -> bool:
        if not self._grown() and not final:
            return False
        stop = self._rest.find(self._fence.end)
        found = self._name()
        if found is not None and found[0] and (stop < 0 or found[1] <= stop):
            self._call(found[0])
            self._rest = self._rest[found[1] :]
            self._before = ""
            self._argued = self._opened = False
            self._scan = JsonScan(self._fence.end)
            self._step = self._arguments
            return True
        if stop < 0 and not final:
            return False
        size = len(self._rest) if stop < 0 else stop + len(self._fence.end)
        self._before += self._rest[:size] if self._before else ""
        self._rest = self._rest[size:]
        self._seen = 0
        self._step = self._block
        return True

    def _name(self) -> tuple[str, int] | None:
        """The name and where arguments begin, once both are certain."""
        at = self._rest.find(self._fence.separator)
        if at < 0:
            return None
        head, at = self._rest[:at], at + len(self._fence.separator)
        if self._fence.fenced:
            line = self._rest.find("\n", at)
            if line < 0:
                return None
            return self._rest[at:line].strip(), line + 1
        name = head.strip()
        if self._fence.prefix:
            before, _, number = name.rpartition(":")
            name = (before if before and number.isdigit() else name).removeprefix(self._fence.prefix)
        return name, at

    def _arguments(self, final: bool) -> bool:
        scan = self._scan
        if not self._argued and not self._skip_opening(final):
            return False
        stop = scan.block_end(self._rest)
        if stop is None and not final:
            certain = len(self._rest[: scan.read].rstrip(self._closing))
            if certain > scan.taken:
                self._argue(self._rest[scan.taken : certain])
                scan.taken = certain
            return False
        body = self._rest if stop is None else self._rest[:stop]
        self._argue(self._cleaned(body)[scan.taken :])
        self._rest = "" if stop is None else self._rest[stop + len(self._fence.end) :]
        self._seen = 0
        self._step = self._block
        return True

    def _skip_opening(self, final: bool) -> bool:
        """Drop what stands before the arguments; False when more text may belong to it."""
        self._rest = self._rest.lstrip(_WHITE)
        mark = "```json\n"
        if self._fence.fenced and not self._opened:
            if self._rest.startswith(mark):
                self._rest = self._rest[len(mark) :].lstrip(_WHITE)
            elif not final and mark.startswith(self._rest):
                return False
            self._opened = True
        if not self._rest and not final:
            return False
        self._argued = True
        return True

    def _cleaned(self, body: str) -> str:
        text = body.rstrip(_WHITE)
        return text.removesuffix("```").rstrip(_WHITE) if self._fence.fenced else text
