r"""The text of a freeform (`custom`) tool call, read from the arguments that the policy wrote.

The model is offered a freeform tool as a function with one string parameter, `input`; the wire carries plain
text. The rule, which needs no look ahead and so holds for streams and whole answers alike:

* Arguments that open with `{"input": "` (any JSON blanks): the text is that string up to its closing quote, or up
  to where the arguments end. Escapes are decoded as JSON says; one that JSON does not know stays as it was
  written, raw control characters stay, half of a surrogate pair becomes U+FFFD. What follows the closing quote is
  not carried.
* All others: the arguments' text, as it is.

Only arguments that are exactly `{"input": <string>}` come back from the client as what was sampled.
"""

from __future__ import annotations

import re

import msgspec

from openforgerl.conversation import parse_arguments

PARAMETER = "input"
"""The one parameter of a freeform tool as the model sees it."""

_OPENING = ("{", f'"{PARAMETER}"', ":", '"')
_BLANK = " \t\n\r"
_SIMPLE = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile(r'[^"\\]+')
_UNICODE = re.compile(r"\\u([0-9A-Fa-f]{4})")
_CUT_UNICODE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_LOST = "\ufffd"


class FreeformText:
    """Reads the arguments piece by piece and gives out the text as soon as it is certain."""

    def __init__(self) -> None:
        self._held = ""
        self._at = 0
        self._matched = 0
        self._state = self._undecided

    def feed(self, piece: str) -> str:
        """More of the arguments; the text that is certain now."""
        self._held += piece
        return self._state(final=False)

    def finish(self) -> str:
        """The arguments are over; the rest of the text."""
        return self._state(final=True)

    def _undecided(self, *, final: bool) -> str:
        while self._matched < len(_OPENING):
            literal = _OPENING[self._matched]
            while self._at < len(self._held) and self._held[self._at] in _BLANK:
                self._at += 1
            seen = self._held[self._at : self._at + len(literal)]
            if seen != literal:
                if literal.startswith(seen) and not final:
                    return ""
                self._state = self._raw
                return self._raw(final=final)
            self._at += len(literal)
            self._matched += 1
        self._held = self._held[self._at :]
        self._state = self._string
        return self._string(final=final)

    def _raw(self, *, final: bool) -> str:
        text, self._held = self._held, ""
        return text

    def _closed(self, *, final: bool) -> str:
        self._held = ""
        return ""

    def _string(self, *, final: bool) -> str:
        text: list[str] = []
        at, held = 0, self._held
        while at < len(held):
            if held[at] == '"':
                self._state, self._held = self._closed, ""
                return "".join(text)
            if plain := _PLAIN.match(held, at):
                text.append(plain.group())
                at = plain.end()
                continue
            decoded = _escape(held, at, final)
            if decoded is None:
                break
            piece, at = decoded
            text.append(piece)
        self._held = held[at:]
        return "".join(text)


def _escape(held: str, at: int, final: bool) -> tuple[str, int] | None:
    """What the escape at `at` stands for and where it ends; None when more must be seen first."""
    if not final and _CUT_UNICODE.fullmatch(held, at):
        return None
    following = held[at + 1 : at + 2]
    if following in _SIMPLE and following:
        return _SIMPLE[following], at + 2
    found = _UNICODE.match(held, at)
    if found is None:
        return held[at : at + 2], at + 2  # no escape of JSON's: as written
    unit = int(found.group(1), 16)
    if not 0xD800 <= unit <= 0xDFFF:
        return chr(unit), found.end()
    if unit >= 0xDC00:
        return _LOST, found.end()
    rest = held[found.end() : found.end() + 6]
    if not final and (not rest or (len(rest) < 6 and _CUT_UNICODE.fullmatch(rest))):
        return None
    low = _UNICODE.match(rest)
    if low is None or not 0xDC00 <= int(low.group(1), 16) <= 0xDFFF:
        return _LOST, found.end()
    return chr(0x10000 + ((unit - 0xD800) << 10) + (int(low.group(1), 16) - 0xDC00)), found.end() + 6


def freeform_text(arguments: str) -> str:
    """The text of a whole call."""
    reader = FreeformText()
    return reader.feed(arguments) + reader.finish()


def freeform_arguments(text: str) -> str:
    """The arguments as the model is shown them: what a client's freeform text stands for."""
    return msgspec.json.encode({PARAMETER: text}).decode()


def echoed_arguments(arguments: str) -> str:
    """The arguments that a client's echo of this call will stand for: themselves when they are exact."""
    text = freeform_text(arguments)
    return arguments if parse_arguments(arguments) == {PARAMETER: text} else freeform_arguments(text)
