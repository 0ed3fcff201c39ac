"""A session led again against its recorded answers: which call is which, and where the requests differ.

Calls are matched by their place in their thread. Ids of tool calls are drawn anew in every session, so they are
compared by the order in which they come up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from openforgerl.conversation import plain_call_id
from openforgerl.trajectory.differences import Difference, first_difference
from openforgerl.types import Conversation, JsonValue, Message, ModelCall


class Record:
    """The calls of a recorded session, handed out one by one to the calls of another session.

    Threads are the same when they have one name; else the n-th new thread of a role is the n-th one of that role
    in the record that no thread of that name claims: names may hold ids that a harness draws anew.
    """

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self._threads: dict[str, list[ModelCall]] = {}
        for call in sorted(calls, key=lambda call: (call.index, call.call_id)):
            self._threads.setdefault(call.thread, []).append(call)
        self._claimed: dict[str, str] = {}
        """Thread of the new session → thread of the record."""
        self._asked: dict[str, int] = {}

    def next(self, call: ModelCall) -> ModelCall | None:
        """The recorded call in whose place `call` stands; None when the record holds none. Ask once for each call."""
        thread = self._thread(call)
        if thread is None:
            return None
        place = self._asked.get(thread, 0)
        self._asked[thread] = place + 1
        recorded = self._threads[thread]
        return recorded[place] if place < len(recorded) else None

    def _thread(self, call: ModelCall) -> str | None:
        if call.thread not in self._claimed:
            taken = set(self._claimed.values())
            free = [name for name, calls in self._threads.items() if name not in taken and calls[0].role is call.role]
            found = call.thread if call.thread in free else next(iter(free), None)
            if found is None:
                return None
            self._claimed[call.thread] = found
        return self._claimed[call.thread]


class ReplayedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the new session."""

    index: int
    thread: str
    recorded: str | None
    """The call of the record in whose place it stands."""
    state: Literal["same", "diverged", "live", "not_in_record"]
    """`live`: from the fork on nothing is compared."""
    difference: Difference | None = None
    other_ids: bool = False
    """The conversation is the same and the prompt's ids are not: the template, its clock or the tokenizer differ."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A session compared with its record."""

    calls: tuple[ReplayedCall, ...]
    not_asked: tuple[str, ...]
    """Calls of the record that the new session never came to."""

    @property
    def diverged(self) -> bool:
        """Whether any request differs, is missing or is new."""
        return bool(self.not_asked) or any(call.state in ("diverged", "not_in_record") for call in self.calls)


def compare_sessions(recorded: Sequence[ModelCall], now: Sequence[ModelCall], *, fork: int | None = None) -> Replay:
    """Compare request by request. `fork`: the first `fork` calls were answered from the record, the others live."""
    record, found, seen = Record(recorded), list[ReplayedCall](), set[str]()
    for call in sorted(now, key=lambda call: call.index):
        theirs = record.next(call)
        if theirs is not None:
            seen.add(theirs.call_id)
        found.append(_compared(call, theirs, fork))
    missing = [call.call_id for call in recorded if call.call_id not in seen and (fork is None or call.index < fork)]
    return Replay(calls=tuple(found), not_asked=tuple(missing))


def _compared(call: ModelCall, theirs: ModelCall | None, fork: int | None) -> ReplayedCall:
    if fork is not None and (theirs is None or theirs.index >= fork):
        recorded = None if theirs is None else theirs.call_id
        return ReplayedCall(index=call.index, thread=call.thread, recorded=recorded, state="live")
    if theirs is None:
        return ReplayedCall(index=call.index, thread=call.thread, recorded=None, state="not_in_record")
    difference = request_difference(theirs.conversation, call.conversation) or _asked_difference(theirs, call)
    return ReplayedCall(
        index=call.index,
        thread=call.thread,
        recorded=theirs.call_id,
        state="same" if difference is None else "diverged",
        difference=difference,
        other_ids=difference is None and call.prompt.ids != theirs.prompt.ids,
    )


def request_difference(recorded: Conversation, now: Conversation) -> Difference | None:
    """The first thing that differs between two whole requests, ids of tool calls aside; None when nothing does."""
    left, right = _with_plain_ids(recorded), _with_plain_ids(now)
    found = first_difference(left, right)
    if found is None and len(right.messages) > len(left.messages):
        new = right.messages[len(left.messages)]
        return Difference(cause="history_edited", where=f"messages[{len(left.messages)}]", now=new.text[:48])
    return found


_CHOICE = ("tool_choice", "toolConfig", "tool_config", "parallel_tool_calls")
"""What a body says of the tools that may be called, in all dialects."""


def _asked_difference(recorded: ModelCall, now: ModelCall) -> Difference | None:
    """The first sampling field or choice of tools that the harness writes otherwise; None when it asks as it did."""
    before, after = _asked(recorded), _asked(now)
    for name in sorted(before.keys() | after.keys()):
        then, again = before.get(name), after.get(name)
        if then != again:
            return Difference(cause="sampling_changed", where=name, before=_short(then), now=_short(again))
    return None


def _asked(call: ModelCall) -> dict[str, JsonValue]:
    body: dict[str, JsonValue] = call.request if isinstance(call.request, dict) else {}
    return {**call.sampling_asked, **{name: body[name] for name in _CHOICE if name in body}}


def _short(value: JsonValue) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()[:48]


def _with_plain_ids(conversation: Conversation) -> Conversation:
    """The conversation with its tool-call ids numbered in the order in which they come up."""
    names: dict[str, str] = {}

    def named(call_id: str) -> str:
        return names.setdefault(plain_call_id(call_id), f"call{len(names)}")

    messages: list[Message] = []
    for message in conversation.messages:
        calls = tuple(msgspec.structs.replace(call, id=named(call.id)) for call in message.tool_calls)
        answers = None if message.tool_call_id is None else named(message.tool_call_id)
        messages.append(msgspec.structs.replace(message, tool_calls=calls, tool_call_id=answers))
    return Conversation(messages=tuple(messages), tools=conversation.tools)
