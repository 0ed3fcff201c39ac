r"""Hermes answers (Qwen 2.5, Qwen 3, Hermes and kin): JSON between `<tool_call>` and `</tool_call>`.

::

    answer   = [white space "<think>"] thought "</think>" body      (the prompt may already have opened it)
    body     = { text | "<tool_call>" JSON "</tool_call>" }

* A block is a call if it starts `{"name": "...", "arguments":`, or is one valid JSON object with a usable
  `name` (a non-empty string); otherwise it stays text, markers included.
* Arguments are the exact text of their JSON value, however it is spaced; `</tool_call>` inside a JSON string
  is part of it. Where the value never closes (or a control character has broken a string) they are the text
  before the next `</tool_call>`, without trailing white space and the one brace that closed the block.
  A block without arguments has the empty text. What else the block holds is dropped.
"""

from __future__ import annotations

import json
import re

from openforgerl.rendering.answers import END_THINK, THINK, Reading, Style, held_back
from openforgerl.rendering.json_text import JsonScan, usable_name, whole_call
from openforgerl.rendering.schemas import ParameterTypes

CALL, END_CALL = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+")\s*,\s*"arguments"\s*:\s*(?=\S)')
_ARGUMENTS = '"arguments"'


class HermesForm:
    """JSON calls between `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    marks = frozenset({THINK, END_THINK, CALL, END_CALL})
    typed = False
    goes_on = ""
    forced = CALL + '\n{"name": "'

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        if name is None:
            return self.forced, "", ""
        return CALL + '\n{"name": ', json.dumps(name, ensure_ascii=False), ', "arguments":'

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> HermesGrammar:
        """See `AnswerForm.grammar`."""
        return HermesGrammar(style, thought_open=thought_open, seed=seed)


class HermesGrammar(Reading):
    """Reads one hermes answer."""

    def __init__(self, style: Style, *, thought_open: bool, seed: str) -> None:
        super().__init__(style, opens=(CALL,), thought_open=thought_open, seed=seed)
        self._scan = JsonScan(END_CALL)
        self._seen = 0  # characters of a block in which no head was found

    def _enter(self, marker: str) -> None:
        self._scan = JsonScan(END_CALL)
        self._seen = 0
        self._step = self._block

    def _block(self, final: bool) -> bool:
        # A head is complete with a character after its colon. Without these tests an answer that goes on with blanks,
        # or with a name that never closes, would be matched whole at every token.
        new, self._seen = self._rest[self._seen :], len(self._rest)
        head = _HEAD.match(self._rest) if new.strip() and _ARGUMENTS in self._rest else None
        name = usable_name(head.group(1)) if head else None
        if head and name is not None:
            self._call(name)
            self._rest = self._rest[head.end() :]
            self._scan = JsonScan(END_CALL)
            self._step = self._arguments
            return True
        stop = self._scan.block_end(self._rest)
        if stop is None and not final:
            return False
        body = self._rest if stop is None else self._rest[:stop]
        whole = body if stop is None else body + END_CALL
        self._rest = self._rest[len(whole) :]
        found = whole_call(body)
        if found is None:
            self._block_is_text(CALL + whole)
        else:
            self._call(found[0])
            self._argue(found[1])
            self._block_ends()
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
            self._block_ends()
            return True
        if final:
            self._argue(self._rest[scan.taken :])
            self._rest = ""
            return False
        held = held_back(self._rest, END_CALL)
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
        self._block_ends()
        return True


def _before_tail(text: str, start: int, stop: int) -> int:
    """Where `text[start:stop]` ends without its last blanks and one brace before them, which may close the call."""
    end = start + len(text[start:stop].rstrip())
    return end - 1 if end > start and text[end - 1] == "}" else end
