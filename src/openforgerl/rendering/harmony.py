"""gpt-oss: an answer is messages on channels (the harmony format).

Source: the chat template and OpenAI's description of harmony.

* A message is a header, `<|message|>`, and content up to `<|end|>` (or whatever else begins a message or ends the
  turn). The prompt has written `<|start|>assistant` of the first.
* `to=` in the header makes it a call of that tool (`functions.` is left out of its name), whatever the channel;
  arguments are the content, verbatim. Without `to=`, channel `analysis` is reasoning, any other is text.
* A header that never ends is dropped; if the answer holds nothing else, and no token of the format, it is text.
* Without tools on offer the content of a call is text.
"""

from __future__ import annotations

import re

from openforgerl.rendering.answers import Reading, Style, held_back
from openforgerl.rendering.schemas import ParameterTypes

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyForm:
    """Messages on the channels `analysis`, `commentary` and `final`."""

    name = "harmony"
    marks = frozenset({*_ENDS, _MESSAGE, "<|constrain|>"})
    typed = False
    goes_on = "<|start|>assistant"
    forced = "<|channel|>commentary to=functions."

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """See `AnswerForm.opening`."""
        return (self.forced, "", "") if name is None else (self.forced, name, " <|constrain|>json<|message|>")

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> HarmonyGrammar:
        """See `AnswerForm.grammar`."""
        return HarmonyGrammar(style, seed=seed)


class HarmonyGrammar(Reading):
    """Reads one answer."""

    def __init__(self, style: Style, *, seed: str) -> None:
        super().__init__(style, opens=(), thought_open=False, seed=seed)
        self._kind = "text"
        self._any = False
        self._step = self._header

    def _header(self, final: bool) -> bool:
        found = self._rest.find(_MESSAGE)
        if found < 0:
            if final:
                if not self._any and not any(mark in self._rest for mark in HarmonyForm.marks):
                    self._say(self._rest)
                self._rest = ""
            return False
        # Whatever stands before the last beginning of a message belongs to none.
        header = self._rest[:found].rpartition("<|start|>")[2].rpartition("<|end|>")[2]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._any = True
        self._kind = "text"
        if recipient is not None and self._style.calls:
            self._call(recipient[1].removeprefix(_FUNCTIONS) or recipient[1])
            self._kind = "arguments"
        elif recipient is None and channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        self._rest = self._rest[found + len(_MESSAGE) :]
        self._step = self._content
        return True

    def _content(self, final: bool) -> bool:
        found = _END.search(self._rest)
        stop = found.start() if found else len(self._rest)
        if found is None and not final:
            stop -= max(held_back(self._rest, mark) for mark in _ENDS)
        self._deliver(self._rest[:stop])
        self._rest = self._rest[stop:]
        if found is None:
            return False
        self._rest = self._rest[len(found.group()) :] if found.group() == "<|end|>" else self._rest
        self._step = self._header
        return True

    def _deliver(self, text: str) -> None:
        if self._kind == "reasoning":
            self._reason(text)
        elif self._kind == "arguments":
            self._argue(text)
        else:
            self._say(text)
