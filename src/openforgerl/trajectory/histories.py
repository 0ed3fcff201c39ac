"""Conversations as paths in a tree, so that one is told from another in a step and not message by message.

Every request brings its whole history again, and a session has had many. Comparing each new history with every known
one would take a time that grows with the cube of the turns. Here each beginning of a known history has a number: two
have the same one exactly when they are canonically equal (`conversation.same_message`, message by message).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from openforgerl.conversation import Beginnings, digest_message, digest_outline, digest_tools
from openforgerl.types import Conversation, Message, ModelCall, ToolSpec

UNSEEN = -1
"""The number of every beginning that no known call has."""
_START = 0
_LISTS = 8
"""How many conversations' numbers are at hand."""


class Path(msgspec.Struct, frozen=True):
    """The beginnings of one history: at `[n]` the number of its first n messages."""

    exact: Sequence[int]
    outline: Sequence[int]
    """As `exact`, thoughts left out."""


class End(msgspec.Struct, frozen=True):
    """A whole history of a known call."""

    exact: int
    outline: int
    length: int
    """Messages."""


class Histories:
    """The numbers of the histories of one session's calls.

    Grows with what is new in a call: a message that was seen behind the same beginning adds nothing. A history that is
    only asked about adds nothing either.
    """

    def __init__(self) -> None:
        self._digests: dict[Message, tuple[str, str]] = {}
        self._exact: dict[tuple[int, str], int] = {}
        self._outline: dict[tuple[int, str], int] = {}
        self._noted: dict[str, ModelCall] = {}
        self._asked: dict[str, tuple[Conversation, End]] = {}
        self._answered: dict[str, tuple[Message, End]] = {}
        self._by_asked: dict[int, dict[str, None]] = {}
        """Exact number of what was asked → calls."""
        self._by_answered: dict[int, dict[str, None]] = {}
        """Number without thoughts of what was asked and answered → calls."""
        self._tools: list[tuple[tuple[ToolSpec, ...], str]] = []
        self._numbers: Beginnings[Message, tuple[int, int]] = Beginnings(_LISTS)

    @property
    def size(self) -> int:
        """Beginnings that have a number; what memory grows with."""
        return len(self._exact)

    def path(self, messages: Sequence[Message]) -> Path:
        """The numbers of every beginning of `messages`; those of no known call are `UNSEEN`."""
        known = self._numbers.known(messages)
        exact = [_START, *(number for number, _ in known)]
        outline = [_START, *(number for _, number in known)]
        for message in messages[len(known) :]:
            whole, bare = self._digests.get(message) or _digested(message)
            exact.append(self._exact.get((exact[-1], whole), UNSEEN))
            outline.append(self._outline.get((outline[-1], bare), UNSEEN))
        return Path(exact, outline)

    def note(self, calls: Iterable[ModelCall]) -> None:
        """Give numbers to the histories of known calls; those that were noted as they are cost nothing."""
        for call in calls:
            if self._noted.get(call.call_id) is not call:
                self.asked(call)
                self.answered(call)
                self._noted[call.call_id] = call

    def asked_alike(self, exact: int) -> Iterable[str]:
        """Noted calls that were asked the very history of this number."""
        return self._by_asked.get(exact, ())

    def answered_alike(self, outline: int) -> Iterable[str]:
        """Noted calls whose messages and answer, thoughts left out, are the history of this number."""
        return self._by_answered.get(outline, ())

    def asked(self, call: ModelCall) -> End:
        """The history that a known call was asked with."""
        found = self._asked.get(call.call_id)
        if found is not None and found[0] is call.conversation:
            return found[1]
        numbers = self._numbers.known(call.conversation.messages)
        exact, outline = numbers[-1] if numbers else (_START, _START)
        for message in call.conversation.messages[len(numbers) :]:
            exact, outline = self._behind(exact, outline, message)
            numbers.append((exact, outline))
        self._numbers.keep(call.conversation.messages, numbers)
        end = End(exact, outline, len(call.conversation.messages))
        if found is not None:
            self._by_asked[found[1].exact].pop(call.call_id, None)
        self._asked[call.call_id] = call.conversation, end
        self._by_asked.setdefault(end.exact, {})[call.call_id] = None
        return end

    def answered(self, call: ModelCall) -> End | None:
        """The same with the call's answer, or None when it has none."""
        if call.answer is None:
            return None
        found = self._answered.get(call.call_id)
        if found is not None and found[0] is call.answer:
            return found[1]
        before = self.asked(call)
        exact, outline = self._behind(before.exact, before.outline, call.answer)
        end = End(exact, outline, before.length + 1)
        if found is not None:
            self._by_answered[found[1].outline].pop(call.call_id, None)
        self._answered[call.call_id] = call.answer, end
        self._by_answered.setdefault(end.outline, {})[call.call_id] = None
        return end

    def tools(self, tools: tuple[ToolSpec, ...], *, known: bool) -> str:
        """The digest of a list of tools, made once for each list of a `known` call."""
        for seen, digest in self._tools:
            if seen is tools or seen == tools:
                return digest
        digest = digest_tools(tools)
        if known:
            self._tools.append((tools, digest))
        return digest

    def forget(self, call_id: str) -> None:
        """A call that is not known any more."""
        self._noted.pop(call_id, None)
        asked, answered = self._asked.pop(call_id, None), self._answered.pop(call_id, None)
        if asked is not None:
            self._by_asked[asked[1].exact].pop(call_id, None)
        if answered is not None:
            self._by_answered[answered[1].outline].pop(call_id, None)

    def _behind(self, exact: int, outline: int, message: Message) -> tuple[int, int]:
        """The numbers of a beginning and one message more."""
        digests = self._digests.get(message)
        if digests is None:
            digests = self._digests[message] = _digested(message)
        # Each of the two maps numbers its own entries, from 1.
        return (
            self._exact.setdefault((exact, digests[0]), len(self._exact) + 1),
            self._outline.setdefault((outline, digests[1]), len(self._outline) + 1),
        )


def _digested(message: Message) -> tuple[str, str]:
    return digest_message(message), digest_outline(message)
