"""What all forms of answer share: a thought first, then text and blocks of calls, read piece by piece.

A *form* is how a family of models writes its answers. Its grammar reads one answer: `write` text as it comes, then
`end`. Every decision depends on the text so far only when more text cannot change it, so the result does not depend
on how the answer is cut. It works on text, as inference servers do: a marker that the model spelled with ordinary
tokens counts too.

* A thought is recognised only at the start; one that never closes is all reasoning, with no text. A closing marker
  that stands first closes a thought of nothing (GLM, DeepSeek).
* Newlines around markers belong to the markers, because templates write and strip them: those at both ends of a
  thought, after it, and around a block of calls. All other text is verbatim.
* Without tools on offer the marker of a block is text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from openforgerl.rendering.schemas import ParameterTypes
from openforgerl.types import Message, MessageDelta, Part, Reasoning, Role, Text, ToolCall

THINK, END_THINK = "<think>", "</think>"


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's answers may hold."""

    thinking: bool
    calls: bool
    thought: tuple[str, str] = (THINK, END_THINK)
    """What opens and what closes a thought."""


class Grammar(Protocol):
    """Reads one answer. Deltas are certain when they are returned."""

    def write(self, text: str) -> tuple[MessageDelta, ...]:
        """What `text` makes certain."""
        ...

    def end(self) -> tuple[tuple[MessageDelta, ...], Message]:
        """What the end makes certain, and the whole message."""
        ...


class AnswerForm(Protocol):
    """How a family writes its answers. Stateless."""

    @property
    def name(self) -> str:
        """As configuration and documents call it."""
        ...

    @property
    def marks(self) -> frozenset[str]:
        """Texts of tokens that belong into answers: sampling one does not end the turn."""
        ...

    @property
    def typed(self) -> bool:
        """Whether the types of arguments come from the tools' schemas, because the answer itself does not tell."""
        ...

    @property
    def goes_on(self) -> str:
        """What follows a token that looks like the end of a turn where the turn goes on; "" if nothing can."""
        ...

    @property
    def forced(self) -> str:
        """How every forced opening begins; "" where no call can be forced."""
        ...

    def opening(self, name: str | None, earlier: int) -> tuple[str, str, str]:
        """The beginning of a call that the prompt writes: what stands before the name, the name, what stands after.

        Without a name it ends where one begins. No blank at the end: models write it together with what follows.
        `earlier`: how many calls the conversation holds already.
        """
        ...

    def grammar(self, style: Style, *, thought_open: bool, seed: str, types: ParameterTypes = ()) -> Grammar:
        """A grammar for one answer. `thought_open`: the prompt ends inside a thought. `seed` makes the calls' ids."""
        ...


class Reading:
    """The part of a grammar that reads thoughts and text, and calls `_enter` at the marker of a block."""

    def __init__(
        self, style: Style, *, opens: Sequence[str], thought_open: bool, seed: str, strips: bool = True
    ) -> None:
        """`opens`: the markers of blocks. `strips`: whether newlines around blocks belong to their markers."""
        self._style = style
        self._seed = seed
        self._think, self._end_think = style.thought
        self._opens = re.compile("|".join(map(re.escape, opens))) if style.calls and opens else None
        self._markers = tuple(opens) if style.calls else ()
        self._strips = strips
        self._rest = ""
        self._deltas: list[MessageDelta] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._at_start = thought_open  # newlines here belong to the marker before
        self._gap = ""  # newlines before a block that may turn out to be text
        self._step: Callable[[bool], bool] = self._opening
        if thought_open:
            self._step = self._thought
        elif not style.thinking:
            self._step = self._first

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

    # Each step reads from `_rest` and returns True when another step should run at once.

    def _enter(self, marker: str) -> None:
        """`marker` was read off `_rest`: set the step that reads its block."""
        raise AssertionError(f"{type(self).__name__} reads no blocks, and found {marker}")

    def _first(self, final: bool) -> bool:
        """The beginning of what is no thought; forms whose calls stand only here override it."""
        self._step = self._body
        return True

    def _opening(self, final: bool) -> bool:
        seen = self._rest.lstrip()
        for mark, step in ((self._think, self._thought), (self._end_think, self._first)):
            if seen.startswith(mark):
                self._rest = seen[len(mark) :]
                self._at_start = True
                self._step = step
                return True
        if not final and (self._think.startswith(seen) or self._end_think.startswith(seen)):
            return False
        self._step = self._first
        return True

    def _thought(self, final: bool) -> bool:
        self._skip_newlines()
        found = self._rest.find(self._end_think)
        if found >= 0:
            self._reason(self._rest[:found].rstrip("\n"))
            self._rest = self._rest[found + len(self._end_think) :]
            self._at_start = True
            self._step = self._first
            return True
        if final:
            self._reason(self._rest.rstrip("\n"))
            self._rest = ""
            return False
        self._reason(self._take_certain((self._end_think,)))
        return False

    def _body(self, final: bool) -> bool:
        self._skip_newlines()
        found = self._opens.search(self._rest) if self._opens is not None else None
        if found is not None:
            text = self._rest[: found.start()]
            said = text.rstrip("\n") if self._strips else text
            self._gap = text[len(said) :]
            self._say(said)
            self._rest = self._rest[found.end() :]
            self._enter(found.group())
            return True
        if final or not self._markers:
            self._say(self._rest)
            self._rest = ""
        else:
            self._say(self._take_certain(self._markers))
        return False

    def _block_is_text(self, whole: str) -> None:
        """The block just read, markers included, was no call."""
        self._say(self._gap + whole)
        self._at_start = False
        self._step = self._body

    def _block_ends(self) -> None:
        self._at_start = self._strips
        self._step = self._body

    def _skip_newlines(self) -> None:
        if self._at_start:
            self._rest = self._rest.lstrip("\n")
            self._at_start = not self._rest

    def _take_certain(self, markers: Sequence[str]) -> str:
        """The text before a possible beginning of a marker and the newlines that would belong to it."""
        held = max(held_back(self._rest, marker) for marker in markers)
        certain = self._rest[: len(self._rest) - held]
        if self._strips or self._step == self._thought:
            certain = certain.rstrip("\n")
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


def tool_call_id(seed: str, index: int) -> str:
    """`call` and 24 hex digits: alphanumeric, because some harnesses strip everything else from ids."""
    return "call" + hashlib.sha256(f"{seed}\x00{index}".encode()).hexdigest()[:24]


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
