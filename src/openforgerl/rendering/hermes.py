r"""The grammar of an answer: `<think>` reasoning, text, and hermes tool calls, read piece by piece.

::

    answer   = [white space "<think>"] thought "</think>" body      (the prompt may already have opened it)
    body     = { text | "<tool_call>" JSON "</tool_call>" }

It works on text, as inference servers do: a marker that the model spelled with ordinary tokens counts too.

* A thought is recognised only at the start. One that never closes is all reasoning, with no text.
* Newlines around markers belong to the markers, because templates write and strip them: those at both ends
  of a thought, after `</think>`, before `<tool_call>` and after `</tool_call>`. All other text is verbatim.
* A block is a call if it starts `{"name": "...", "arguments":`, or is one valid JSON object with a usable
  `name` (a non-empty string); otherwise it stays text, markers included.
* Arguments are the exact text of their JSON value, however it is spaced; `</tool_call>` inside a JSON string
  is part of it. Where the value never closes (or a control character has broken a string) they are the text
  before the next `</tool_call>`, without trailing white space and the one brace that closed the block.
  A block without arguments has the empty text. What else the block holds is dropped.
* Without tools on offer `<tool_call>` is text.

Every decision depends on the text so far only when more text cannot change it, so the result does not depend
on how the answer is cut.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

import msgspec

from openforgerl.types import Message, MessageDelta, Part, Reasoning, Role, Text, ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+")\s*,\s*"arguments"\s*:\s*(?=\S)')
_ARGUMENTS = '"arguments"'
_WHITE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r'[^"{}\[\]<]+')


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's answers may hold."""

    thinking: bool
    calls: bool


class AnswerGrammar:
    """Reads one answer. `write` text as it comes, then `end`; deltas are certain when they are returned."""

    def __init__(self, style: Style, *, thought_open: bool, seed: str) -> None:
        """`thought_open`: the prompt ends inside a thought. `seed` makes the ids of tool calls."""
        self._style = style
        self._seed = seed
        self._rest = ""
        self._deltas: list[MessageDelta] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._at_start = thought_open  # newlines here belong to the marker before
        self._gap = ""  # newlines before a block that may turn out to be text
        self._scan = _JsonScan()
        self._seen = 0  # characters of a block in which no head was found
        self._step: Callable[[bool], bool] = self._opening
        if thought_open:
            self._step = self._thought
        elif not style.thinking:
            self._step = self._body

    def write(self, text: str) -> tuple[MessageDelta, ...]:
        """What `text` makes certain."""
        self._rest += text
        return self._run(False)

    def end(self) -> tuple[tuple[MessageDelta, ...], Message]:
        """What the end makes certain, and the whole message."""
        deltas = self._run(True)
        parts: list[Part] = []
        if self._reasoning:
            parts.append(Reasoning("".join(self._reasoning)))
        if self._text:
            parts.append(Text("".join(self._text)))
        calls = tuple(ToolCall(id=i, name=n, arguments="".join(a)) for i, n, a in self._calls)
        return deltas, Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=calls)

    def _run(self, final: bool) -> tuple[MessageDelta, ...]:
        self._deltas = []
        while self._step(final):
            pass
        return tuple(self._deltas)

    # Each step below reads from `_rest` and returns True when another step should run at once.

    def _opening(self, final: bool) -> bool:
        seen = self._rest.lstrip()
        if seen.startswith(THINK):
            self._rest = seen[len(THINK) :]
            self._at_start = True
            self._step = self._thought
            return True
        if THINK.startswith(seen) and not final:
            return False
        self._step = self._body
        return True

    def _thought(self, final: bool) -> bool:
        self._skip_newlines()
        found = self._rest.find(END_THINK)
        if found >= 0:
            self._reason(self._rest[:found].rstrip("\n"))
            self._rest = self._rest[found + len(END_THINK) :]
            self._at_start = True
            self._step = self._body
            return True
        if final:
            self._reason(self._rest.rstrip("\n"))
            self._rest = ""
            return False
        self._reason(self._take_certain(END_THINK))
        return False

    def _body(self, final: bool) -> bool:
        self._skip_newlines()
        found = self._rest.find(CALL) if self._style.calls else -1
        if found >= 0:
            text = self._rest[:found].rstrip("\n")
            self._gap = self._rest[len(text) : found]
            self._say(text)
            self._rest = self._rest[found + len(CALL) :]
            self._scan = _JsonScan()
            self._seen = 0
            self._step = self._block
            return True
        if final or not self._style.calls:
            self._say(self._rest)
            self._rest = ""
        else:
            self._say(self._take_certain(CALL))
        return False

    def _block(self, final: bool) -> bool:
        # A head is complete with a character after its colon. Without these tests an answer that goes on with blanks,
        # or with a name that never closes, would be matched whole at every token.
        new, self._seen = self._rest[self._seen :], len(self._rest)
        head = _HEAD.match(self._rest) if new.strip() and _ARGUMENTS in self._rest else None
        name = _usable_name(head.group(1)) if head else None
        if head and name is not None:
            self._call(name)
            self._rest = self._rest[head.end() :]
            self._scan = _JsonScan()
            self._step = self._arguments
            return True
        stop = self._scan.block_end(self._rest)
        if stop is None and not final:
            return False
        body = self._rest if stop is None else self._rest[:stop]
        whole = body if stop is None else body + END_CALL
        self._rest = self._rest[len(whole) :]
        found = _whole_block(body)
        if found is None:
            self._say(self._gap + CALL + whole)
            self._at_start = False
        else:
            self._call(found[0])
            self._argue(found[1])
            self._at_start = True
        self._step = self._body
        return True

    def _arguments(self, final: bool) -> bool:
        scan = self._scan
        scan.read_value(self._rest)
        if scan.value_end is not None:
            self._argue(self._rest[scan.taken : scan.value_end])
            self._rest = self._rest[scan.value_end :]
            self._step = self._leftover
            return True
        if scan.end_call is not None:
            body = self._rest[scan.taken : scan.end_call].rstrip()
            self._argue(body.removesuffix("}"))
            self._rest = self._rest[scan.end_call + len(END_CALL) :]
            self._at_start = True
            self._step = self._body
            return True
        if final:
            self._argue(self._rest[scan.taken :])
            self._rest = ""
            return False
        held = _held(self._rest, END_CALL)
        certain = _before_tail(self._rest, scan.taken, len(self._rest) - held)
        if certain > scan.taken:
            self._argue(self._rest[scan.taken : certain])
            scan.taken = certain
        return False

    def _leftover(self, final: bool) -> bool:
        ends = [(at, mark) for mark in (END_CALL, CALL) if (at := self._rest.find(mark)) >= 0]
        if not ends:
            if final:
                self._rest = ""
            return False
        at, mark = min(ends)
        self._rest = self._rest[at + (len(mark) if mark == END_CALL else 0) :]
        self._at_start = True
        self._step = self._body
        return True

    def _skip_newlines(self) -> None:
        if self._at_start:
            self._rest = self._rest.lstrip("\n")
            self._at_start = not self._rest

    def _take_certain(self, marker: str) -> str:
        """The text before a possible beginning of `marker` and the newlines that would belong to it."""
        held = _held(self._rest, marker)
        certain = self._rest[: len(self._rest) - held].rstrip("\n")
        self._rest = self._rest[len(certain) :]
        return certain

    def _reason(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            self._deltas.append(MessageDelta(kind="reasoning", text=text))

    def _say(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._deltas.append(MessageDelta(kind="text", text=text))

    def _call(self, name: str) -> None:
        index = len(self._calls)
        call_id = tool_call_id(self._seed, index)
        self._calls.append((call_id, name, []))
        self._deltas.append(MessageDelta(kind="call", text=name, call_index=index, call_id=call_id))

    def _argue(self, text: str) -> None:
        if text:
            call_id, _, arguments = self._calls[-1]
            arguments.append(text)
            self._deltas.append(
                MessageDelta(kind="arguments", text=text, call_index=len(self._calls) - 1, call_id=call_id)
            )


def forced_opening(name: str | None) -> tuple[str, str, str]:
    """The beginning of a call that the prompt writes: what stands before the name, the name, what stands after it.

    Without a name it ends where one begins. No blank at the end: models write it together with what follows.
    """
    if name is None:
        return CALL + '\n{"name": "', "", ""
    return CALL + '\n{"name": ', json.dumps(name, ensure_ascii=False), ', "arguments":'


def tool_call_id(seed: str, index: int) -> str:
    """`call` and 24 hex digits: alphanumeric, because some harnesses strip everything else from ids."""
    return "call" + hashlib.sha256(f"{seed}\x00{index}".encode()).hexdigest()[:24]


class _JsonScan:
    """Follows JSON text far enough to know where strings, one value, and the block end. Resumes where it stopped."""

    def __init__(self) -> None:
        self.taken = 0
        """Characters already delivered."""
        self.value_end: int | None = None
        self.end_call: int | None = None
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._broken = False
        self._kind = ""

    def block_end(self, text: str) -> int | None:
        """Where the first `</tool_call>` outside JSON strings starts."""
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
            if char == "<":
                if text.startswith(END_CALL, self._at):
                    self.end_call = self._at
                    return
                if END_CALL.startswith(text[self._at :]):
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


def _before_tail(text: str, start: int, stop: int) -> int:
    """Where `text[start:stop]` ends without its last blanks and one brace before them, which may close the call."""
    end = start + len(text[start:stop].rstrip())
    return end - 1 if end > start and text[end - 1] == "}" else end


def _held(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _usable_name(literal: str) -> str | None:
    """The name that a JSON string literal spells, or None if it is broken, empty or no Unicode text."""
    try:
        name = json.loads(literal)
        name.encode()
    except ValueError:
        return None
    return name or None


def _whole_block(body: str) -> tuple[str, str] | None:
    """Name and exact arguments text of a block that is one valid JSON object, else None."""
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
    name = _usable_name(found["name"])
    return None if name is None else (name, found.get("arguments", ""))


def _blank(text: str, at: int) -> int:
    match = _WHITE.match(text, at)
    return match.end() if match else at
