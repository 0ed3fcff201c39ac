"""Llama 3: a call is the whole answer, one JSON object with `name` and `parameters`.

Source: the chat templates, which write no text beside a call and refuse more than one.

* An answer is a call if it starts, maybe after `<|python_tag|>`, with `{"name": "...", "parameters":` (or
  `"arguments"`), or with one valid JSON object that has a usable `name`. All other answers are text.
* Arguments are the exact text of their JSON value. What follows the object is dropped.
"""

from __future__ import annotations

import json
import re

from openforgerl.rendering.answers import Reading, Style
from openforgerl.rendering.json_text import JsonScan, usable_name, whole_call
from openforgerl.rendering.schemas import ParameterTypes

_TAG, _END = "<|python_tag|>", "<|eom_id|>"
_KEYS = ("parameters", "arguments")
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\S)'
)


class LlamaForm:
    """A call as `{"name": NAME, "parameters": OBJECT}`, alone."""

    name = "llama"
    marks = frozenset({_TAG})
    typed = False
    goes_on = ""
    forced = '{"name": "'

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        if name is None:
            return self.forced, "", ""
        return '{"name": ', json.dumps(name, ensure_ascii=False), ', "parameters":'

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> LlamaGrammar:
        """See `AnswerForm.grammar`."""
        return LlamaGrammar(style, thought_open=thought_open, seed=seed)


class LlamaGrammar(Reading):
    """Reads one answer."""

    def __init__(self, style: Style, *, thought_open: bool, seed: str) -> None:
        super().__init__(style, opens=(), thought_open=thought_open, seed=seed)
        self._scan = JsonScan(_END)
        self._lead = ""  # what stands before the object
        self._seen = 0

    def _first(self, final: bool) -> bool:
        seen = self._rest.lstrip()
        tagged = seen.startswith(_TAG)
        seen = seen.removeprefix(_TAG).lstrip()
        if not self._style.calls or (seen and not seen.startswith("{") and (tagged or not _TAG.startswith(seen))):
            self._step = self._body
            return True
        if not seen.startswith("{"):
            if final:
                self._step = self._body
            return final
        self._lead, self._rest = self._rest[: len(self._rest) - len(seen)], seen
        self._step = self._object
        return True

    def _object(self, final: bool) -> bool:
        new, self._seen = self._rest[self._seen :], len(self._rest)
        head = _HEAD.match(self._rest) if new.strip() and any(key in self._rest for key in _KEYS) else None
        name = usable_name(head.group(1)) if head else None
        if head and name is not None:
            self._call(name)
            self._rest = self._rest[head.end() :]
            self._scan = JsonScan(_END)
            self._step = self._arguments
            return True
        self._scan.read_value(self._rest)
        stop = self._scan.value_end if self._scan.value_end is not None else self._scan.end_call
        if stop is None and not final:
            return False
        body = self._rest if stop is None else self._rest[:stop]
        self._rest = self._rest[len(body) :]
        found = whole_call(body, _KEYS)
        if found is None:
            self._at_start = False
            self._say(self._lead + body)
            self._step = self._body
        else:
            self._call(found[0])
            self._argue(found[1])
            self._step = self._dropped
        return True

    def _arguments(self, final: bool) -> bool:
        scan = self._scan
        scan.read_value(self._rest)
        stop = scan.value_end if scan.value_end is not None else scan.end_call
        certain = stop if stop is not None else len(self._rest) if final else scan.read
        self._argue(self._rest[scan.taken : certain])
        scan.taken = certain
        if stop is None and not final:
            return False
        self._rest = ""
        self._step = self._dropped
        return True

    def _dropped(self, final: bool) -> bool:
        self._rest = ""
        return False
