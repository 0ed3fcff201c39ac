"""Conversations as paths in a tree, so that one is told from another in a step and not message by message.

Every request brings its whole history again, and a session has had many. Comparing each new history with every known
one would take a time that grows with the cube of the turns. Here each beginning of a known history has a number: two
have the same one exactly when they are canonically equal (`conversation.same_message`, message by message).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.conversation import digest_message, digest_outline, digest_tools
from openforgerl.types import Conversation, Message, ModelCall, ToolSpec

UNSEEN = -1
"""The number of every beginning that no known call has."""
_START = 0


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
        self._asked: dict[str, tuple[Conversation, End]] = {}
        self._answered: dict[str, tuple[Message, End]] = {}
        self._tools: list[tuple[tuple[ToolSpec, ...], str]] = []

    @property
    def size(self) -> int:
        """Beginnings that have a number; what memory grows with."""
        return len(self._exact)

    def path(self, messages: Sequence[Message]) -> Path:
        """The numbers of every beginning of `messages`; those of no known call are `UNSEEN`."""
        exact, outline = [_START], [_START]
        for message in messages:
            whole, bare = self._digests.get(message) or _digested(message)
            exact.append(self._exact.get((exact[-1], whole), UNSEEN))
            outline.append(self._outline.get((outline[-1], bare), UNSEEN))
        return Path(exact, outline)

    def asked(self, call: ModelCall) -> End:
        """The history that a known call was asked with."""
        found = self._asked.get(call.call_id)
        if found is not None and found[0] is call.conversation:
            return found[1]
        exact = outline = _START
        for message in call.conversation.messages:
            exact, outline = self._behind(exact, outline, message)
        end = End(exact, outline, len(call.conversation.messages))
        self._asked[call.call_id] = call.conversation, end
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
        self._answered[call.call_id] = call.answer, end
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
        self._asked.pop(call_id, None)
        self._answered.pop(call_id, None)

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
