"""Calls whose arguments stand in tags, one a parameter: the reading that Qwen3-Coder, GLM, MiniMax and DSML share.

::

    block = open { head { parameter } [ end of call ] } close

* A block that has a head is one call or more; one without stays text, markers included.
* A value is the text up to its first closing tag; the schema says what JSON it is (`schemas`).
* Arguments are written as `{"key": value, ...}` while their values close. A call whose closing tags are missing is
  left open, as cut JSON, so that no tool runs on half of its arguments; a block that closes closes its call.
* What else stands between tags is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from openforgerl.rendering.answers import Reading, Style
from openforgerl.rendering.schemas import ParameterTypes, as_string, json_of


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of one family. Patterns begin with a literal `<` and hold no `<` of names inside."""

    open: str
    close: str
    head: re.Pattern[str]
    """The beginning of a call; group `name`. It needs no text after it to be certain."""
    parameter: re.Pattern[str]
    """All that stands before a value; group `key`, and `text` where the tag itself says whether it is a string."""
    end_value: str
    end_call: str = ""
    """What ends one call of several in a block; "" where every call has a block of its own."""
    newlines: bool = False
    """Whether one newline at each end of a value belongs to the tags."""
    untyped_json: bool = False
    """Whether a parameter that no schema describes is tried as JSON."""


class TagGrammar(Reading):
    """Reads one answer with calls in tags."""

    def __init__(self, style: Style, *, tags: Tags, thought_open: bool, seed: str, types: ParameterTypes) -> None:
        super().__init__(style, opens=(tags.open,), thought_open=thought_open, seed=seed)
        self._tags = tags
        self._types = dict(types)
        self._declared: Mapping[str, Sequence[str]] = {}
        self._key = ""
        self._as_text: bool | None = None
        self._filled = False
        self._seen = 0
        ends = sorted(filter(None, (tags.end_call, tags.close, tags.open)), key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, ends)))

    def _enter(self, marker: str) -> None:
        self._seen = 0
        self._step = self._block

    def _new(self) -> bool:
        """Whether what came since the last look can complete a tag; else nothing needs to be searched again."""
        new, self._seen = self._rest[self._seen :], len(self._rest)
        return ">" in new or "\n" in new or "<" in new

    def _block(self, final: bool) -> bool:
        """Before the first head of a block."""
        if not self._new() and not final:
            return False
        head = self._tags.head.search(self._rest)
        stop = self._rest.find(self._tags.close)
        if head is not None and (stop < 0 or head.start() < stop):
            self._begin(head)
            return True
        if stop < 0 and not final:
            return False
        whole = self._rest if stop < 0 else self._rest[: stop + len(self._tags.close)]
        self._rest = self._rest[len(whole) :]
        self._block_is_text(self._tags.open + whole)
        return True

    def _begin(self, head: re.Match[str]) -> None:
        name = head["name"]
        self._declared = dict(self._types.get(name, ()))
        self._filled = False
        self._call(name)
        self._argue("{")
        self._rest = self._rest[head.end() :]
        self._move(self._parameters)

    def _parameters(self, final: bool) -> bool:
        """Between the values of a call."""
        if self._new() or final:
            found = self._tags.parameter.search(self._rest)
            end = self._ends.search(self._rest)
            if found is not None and (end is None or found.start() < end.start()):
                self._key = found["key"]
                told = found.groupdict().get("text")
                self._as_text = None if told is None else told == "true"
                self._rest = self._rest[found.end() :]
                self._move(self._value)
                return True
            if end is not None:
                self._argue("}")
                self._end_of_call(end)
                return True
        if final:
            self._rest = ""
        return False

    def _end_of_call(self, end: re.Match[str]) -> None:
        self._rest = self._rest[end.end() :]
        if end.group() == self._tags.end_call:
            self._move(self._between)
        elif end.group() == self._tags.open:
            self._enter(end.group())
        else:
            self._block_ends()

    def _between(self, final: bool) -> bool:
        """After a call, where another may begin."""
        if self._new() or final:
            head = self._tags.head.search(self._rest)
            end = self._ends.search(self._rest)
            if head is not None and (end is None or head.start() < end.start()):
                self._begin(head)
                return True
            if end is not None:
                self._end_of_call(end)
                return True
        if final:
            self._rest = ""
        return False

    def _value(self, final: bool) -> bool:
        end = self._tags.end_value
        # `_seen` characters hold no end; one may have begun in their last.
        found = self._rest.find(end, max(self._seen - len(end), 0))
        self._seen = len(self._rest)
        if found >= 0:
            self._argue(self._field() + self._json(self._inner(self._rest[:found])))
            self._rest = self._rest[found + len(end) :]
            self._move(self._parameters)
            return True
        if final:
            self._argue(self._field() + as_string(self._inner(self._rest))[:-1])
            self._rest = ""
        return False

    def _field(self) -> str:
        before = ", " if self._filled else ""
        self._filled = True
        return f"{before}{as_string(self._key)}: "

    def _inner(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._tags.newlines else text

    def _json(self, text: str) -> str:
        if self._as_text is not None:
            return as_string(text) if self._as_text else json_of(text, None, untyped_json=True)
        return json_of(text, self._declared.get(self._key), untyped_json=self._tags.untyped_json)

    def _move(self, step: Callable[[bool], bool]) -> None:
        self._seen = 0
        self._step = step
