"""Mistral: calls after `[TOOL_CALLS]`, as `NAME[ARGS]JSON` (newer) or as one JSON list (older).

Source: the chat templates. `[CALL_ID]` between name and arguments is read and dropped: ids of calls are ours.

* Arguments are the text of one JSON value, up to the next `[TOOL_CALLS]` if the value never closes.
* What else stands between two markers is dropped; text after the last call's arguments is dropped too, because no
  template can write it back.
* A marker without a name, or with a list that holds anything but calls, stays text.
"""

from __future__ import annotations

import json

from openforgerl.rendering.answers import Reading, Style
from openforgerl.rendering.json_text import JsonScan, whole_call
from openforgerl.rendering.schemas import ParameterTypes

THOUGHT = ("[THINK]", "[/THINK]")
_CALL, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralForm:
    """`listed`: calls are one JSON list; otherwise each has a marker of its own."""

    marks = frozenset({*THOUGHT, _CALL, _ID, _ARGS})
    typed = False
    goes_on = ""

    def __init__(self, *, listed: bool) -> None:
        self.name = "mistral-list" if listed else "mistral"
        self._listed = listed
        self.forced = _CALL + ('[{"name": "' if listed else "")

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        if name is None:
            return self.forced, "", ""
        if self._listed:
            return _CALL + '[{"name": ', json.dumps(name, ensure_ascii=False), ', "arguments":'
        return self.forced, name, _ARGS

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> MistralGrammar:
        """See `AnswerForm.grammar`."""
        return MistralGrammar(style, thought_open=thought_open, seed=seed)


class MistralGrammar(Reading):
    """Reads one answer of either kind."""

    def __init__(self, style: Style, *, thought_open: bool, seed: str) -> None:
        super().__init__(style, opens=(_CALL,), thought_open=thought_open, seed=seed, strips=False)
        self._scan = JsonScan(_CALL)
        self._seen = 0
        self._lead = ""  # white space before a list

    def _enter(self, marker: str) -> None:
        self._scan = JsonScan(_CALL)
        self._seen = 0
        self._step = self._head

    def _head(self, final: bool) -> bool:
        shown = self._rest.lstrip()
        if shown.startswith("[") and not _begins(shown, _ARGS) and not _begins(shown, _ID):
            self._lead, self._rest = self._rest[: len(self._rest) - len(shown)], shown
            self._step = self._list
            return True
        new, self._seen = self._rest[max(self._seen - len(_CALL), 0) :], len(self._rest)
        if "[" not in new and "{" not in new and not final:
            return False
        stop = self._rest.find(_CALL)
        head = self._rest if stop < 0 else self._rest[:stop]
        begins = [at for mark in (_ARGS, "{") if (at := head.find(mark)) >= 0]
        if not begins:
            if stop < 0 and not final:
                return False
            self._rest = self._rest[len(head) :]
            self._block_is_text(_CALL + head)
            return True
        at = min(begins)
        name = head[:at].partition(_ID)[0].strip()
        if not name:
            self._rest = self._rest[at:]
            self._block_is_text(_CALL + head[:at])
            return True
        self._call(name)
        self._rest = self._rest[at + (len(_ARGS) if head.startswith(_ARGS, at) else 0) :]
        self._step = self._arguments
        return True

    def _arguments(self, final: bool) -> bool:
        scan = self._scan
        if not scan.read:
            self._rest = self._rest.lstrip()
        scan.read_value(self._rest)
        stop = scan.value_end if scan.value_end is not None else scan.end_call
        body = self._rest[:stop].rstrip() if stop is not None or final else self._rest[: scan.read].rstrip()
        if len(body) > scan.taken:
            self._argue(body[scan.taken :])
            scan.taken = len(body)
        if stop is None:
            if final:
                self._rest = ""
            return False
        self._rest = self._rest[stop:]
        self._step = self._leftover
        return True

    def _list(self, final: bool) -> bool:
        scan = self._scan
        scan.read_value(self._rest)
        stop = scan.value_end if scan.value_end is not None else scan.end_call
        if stop is None and not final:
            return False
        body = self._rest if stop is None else self._rest[:stop]
        self._rest = self._rest[len(body) :]
        calls = _listed_calls(body)
        if calls is None:
            self._block_is_text(_CALL + self._lead + body)
            return True
        for name, arguments in calls:
            self._call(name)
            self._argue(arguments)
        self._step = self._leftover
        return True

    def _leftover(self, final: bool) -> bool:
        found = self._rest.find(_CALL)
        if found < 0:
            self._rest = "" if final else self._rest[-len(_CALL) :]
            return False
        self._rest = self._rest[found + len(_CALL) :]
        self._enter(_CALL)
        return True


def _begins(text: str, marker: str) -> bool:
    """Whether `text` begins with `marker`, as far as it goes."""
    return text.startswith(marker) or marker.startswith(text)


def _listed_calls(text: str) -> list[tuple[str, str]] | None:
    """Name and exact arguments of every call of a JSON list, None if it holds anything else or nothing."""
    decoder = json.JSONDecoder()
    found: list[tuple[str, str]] = []
    at = 1
    try:
        while not text.startswith("]", at := _blank(text, at)):
            if found:
                if not text.startswith(",", at):
                    return None
                at = _blank(text, at + 1)
            _, stop = decoder.raw_decode(text, at)
            call = whole_call(text[at:stop])
            if call is None:
                return None
            found.append(call)
            at = stop
    except (ValueError, RecursionError):
        return None
    return found or None


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
