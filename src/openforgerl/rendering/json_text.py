"""JSON as a model writes it: where a value or a block of it ends, whatever is wrong with it."""

from __future__ import annotations

import json
import re

_WHITE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r'[^"{}\[\]<]+')


class JsonScan:
    """Follows JSON text far enough to know where strings, one value, and the block end. Resumes where it stopped."""

    def __init__(self, end: str) -> None:
        """`end`: what ends the block outside JSON strings; begins with `<` or `[`."""
        self.taken = 0
        """Characters already delivered."""
        self.value_end: int | None = None
        self.end_call: int | None = None
        self._end = end
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._broken = False
        self._kind = ""

    @property
    def read(self) -> int:
        """Characters that were looked at and are not the end of the block."""
        return self._at

    def block_end(self, text: str) -> int | None:
        """Where the first `end` outside JSON strings starts."""
        self._read(text, value=False)
        return self.end_call

    def read_value(self, text: str) -> None:
        """Look for the end of the JSON value that starts at 0: sets `value_end` or `end_call`."""
        self._read(text, value=True)

    def _read(self, text: str, *, value: bool) -> None:
        while self._at < len(text) and self.value_end is None and self.end_call is None:
            char = text[self._at]
            if self._in_string:
                if not self._read_string(text, char):
                    return
                if value and not self._in_string and self._kind == '"' and not self._broken:
                    self.value_end = self._at
                continue
            if char == self._end[0]:
                if text.startswith(self._end, self._at):
                    self.end_call = self._at
                    return
                if self._end.startswith(text[self._at :]):
                    return
            if self._broken:
                self._at += 1
            elif self._depth and (plain := _BETWEEN.match(text, self._at)):
                self._at = plain.end()
            else:
                self._read_outside(char, value=value)

    def _read_outside(self, char: str, *, value: bool) -> None:
        if not self._kind:
            self._kind = char if char in '{["' else "scalar"
        if value and self._kind == "scalar" and (char in ",}]" or char.isspace()):
            self.value_end = self._at
            return
        self._at += 1
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if value and self._depth == 0 and self._kind in ("{", "["):
                self.value_end = self._at

    def _read_string(self, text: str, char: str) -> bool:
        """One step inside a string; False when the next character is needed."""
        if char == "\\":
            if self._at + 1 >= len(text):
                return False
            self._at += 2 if text[self._at + 1] >= " " else 1
        elif char == '"':
            self._in_string = False
            self._at += 1
        elif char < " ":
            # JSON allows no control character here: the string was never closed, so quotes mean nothing now.
            self._broken, self._in_string = True, False
            self._at += 1
        else:
            plain = _IN_STRING.match(text, self._at)
            self._at = plain.end() if plain else self._at + 1
        return True


def usable_name(literal: str) -> str | None:
    """The name that a JSON string literal spells, or None if it is broken, empty or no Unicode text."""
    try:
        name = json.loads(literal)
        name.encode()
    except ValueError:
        return None
    return name or None


def whole_call(body: str, keys: tuple[str, ...] = ("arguments",)) -> tuple[str, str] | None:
    """Name and exact arguments text of a block that is one valid JSON object, else None.

    `keys`: where arguments may stand; the first that the object has counts.
    """
    decoder = json.JSONDecoder()
    found: dict[str, str] = {}
    at = _blank(body, 0)
    if not body.startswith("{", at):
        return None
    try:
        at = _blank(body, at + 1)
        while not body.startswith("}", at):
            if found:
                if not body.startswith(",", at):
                    return None
                at = _blank(body, at + 1)
            key, at = decoder.raw_decode(body, at)
            at = _blank(body, at)
            if not isinstance(key, str) or not body.startswith(":", at):
                return None
            start = _blank(body, at + 1)
            _, stop = decoder.raw_decode(body, start)
            found.setdefault(key, body[start:stop])
            at = _blank(body, stop)
    except (ValueError, RecursionError):
        return None
    if body[at + 1 :].strip() or not found.get("name", "").startswith('"'):
        return None
    name = usable_name(found["name"])
    return None if name is None else (name, next((found[key] for key in keys if key in found), ""))


def _blank(text: str, at: int) -> int:
    match = _WHITE.match(text, at)
    return match.end() if match else at
