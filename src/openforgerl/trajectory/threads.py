"""Which conversation of a session a request belongs to, and which sampled turns its history repeats.

By content first: a request continues call C when C's messages and C's answer are a canonical prefix of its own
messages, with the same tools. Where content does not tell, the harness's headers and opening words do
(`signs.py`). A conversation that nothing explains is `unattributed`: agent code can call the model too.

A function of the set of known calls: the order in which they are given does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from openforgerl.conversation import digest_message, digest_outline, digest_tools, same_message, same_tools
from openforgerl.trajectory.histories import UNSEEN, Histories
from openforgerl.trajectory.signs import Announcement, announcement, delegated, first_user, quotes, stated_role
from openforgerl.types import (
    CallStatus,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Role,
    ThreadRole,
)

_QUOTE = 24
"""A summary or task of fewer characters is no evidence when it turns up in another conversation."""

_ASIDE = (ThreadRole.COMPACTION, ThreadRole.SIDE)


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request belongs."""

    thread: str
    role: ThreadRole
    evidence: str
    parent_call_id: str | None
    """The call whose answer the history continues."""
    restored: dict[int, ModelCall] = {}
    """Index of an assistant message → the call whose delivered answer it canonically equals, with everything
    before it equal too: condition (1) of the restoring rule (DESIGN §5)."""


class _Match(msgspec.Struct, frozen=True, kw_only=True):
    call: ModelCall
    length: int
    """Messages of the history that the call's messages and answer cover."""
    exact: bool
    """Canonically equal; False = equal but for reasoning that the harness dropped."""


def attribute(
    known: Sequence[ModelCall],
    conversation: Conversation,
    *,
    headers: Mapping[str, str],
    opening: bool,
    max_tokens: int | None = None,
    histories: Histories | None = None,
) -> Attribution:
    """Attribute a request.

    `known`: all calls of the session so far, running ones (`intent`) too. `headers`: the request's, in any
    case. `opening`: whether this may be the session's first request (matters only while nothing is known).
    `max_tokens`: as asked, to tell probes. `histories`: the session's, so that what it has seen is not read again.
    """
    calls = sorted(known, key=_arrival)
    asked = _Asked(histories or Histories(), calls, conversation)
    said = announcement(headers)
    # A header is the harness's own word; the opening words could be quoted by anybody.
    stated = stated_role(conversation, max_tokens) if said.role is None else (said.role, said.evidence)

    repeated = _repeated(asked, said)
    if repeated is not None and repeated.parent_call_id is None:
        return Attribution(
            thread=repeated.thread,
            role=repeated.role,
            evidence=f"repeats {repeated.call_id}",
            parent_call_id=None,
        )
    match = _parent(asked, said)
    if match is None:
        thread, role, evidence = _root(calls, conversation, said, stated, opening)
        return Attribution(thread=thread, role=role, evidence=evidence, parent_call_id=None)
    parent = match.call
    thread, role = parent.thread, parent.role
    evidence = f"continues {parent.call_id}" + ("" if match.exact else ", reasoning dropped")
    if said.subagent is not None and said.subagent != _agent(parent):
        thread, role, evidence = f"subagent:{said.subagent}", ThreadRole.SUBAGENT, f"{said.evidence}, {evidence}"
    elif stated is not None and role is not stated[0]:
        thread, role, evidence = _named(stated[0], conversation), stated[0], f"{stated[1]}, {evidence}"
    return Attribution(
        thread=thread,
        role=role,
        evidence=evidence,
        parent_call_id=parent.call_id,
        restored=_restored(parent, asked),
    )


def with_thoughts(
    known: Sequence[ModelCall],
    conversation: Conversation,
    *,
    headers: Mapping[str, str],
    histories: Histories | None = None,
) -> Conversation:
    """The conversation with the thoughts that the harness dropped from turns of ours put back.

    Only where all messages up to the turn are what was recorded, other dropped thoughts aside: where the harness
    rewrote more than that, its history is taken as it is.
    """
    calls = sorted(known, key=_arrival)
    match = _parent(_Asked(histories or Histories(), calls, conversation), announcement(headers))
    if match is None or match.exact or match.call.answer is None:
        return conversation
    theirs = (*match.call.conversation.messages, match.call.answer)
    # What the harness sent is kept but for the parts: it may spell call ids in its own way.
    restored = [
        msgspec.structs.replace(now, parts=then.parts) if then.reasoning and not now.reasoning else now
        for then, now in zip(theirs, conversation.messages, strict=False)
    ]
    return msgspec.structs.replace(conversation, messages=(*restored, *conversation.messages[len(restored) :]))


class _Asked:
    """A request's history, to be compared with those of known calls."""

    def __init__(self, histories: Histories, calls: Sequence[ModelCall], conversation: Conversation) -> None:
        """`calls` in order of arrival."""
        histories.note(calls)
        self.messages = conversation.messages
        self.by_id = {call.call_id: call for call in calls}
        self._histories = histories
        self._path = histories.path(conversation.messages)
        self._tools = histories.tools(conversation.tools, known=False)

    def repeats(self) -> list[ModelCall]:
        """The calls that were asked the very same, in order of arrival."""
        return self._with_same_tools(self._histories.asked_alike(self._path.exact[-1]))

    def continues(self) -> list[_Match]:
        """The calls whose messages and answer cover most of the history, in order of arrival."""
        for length in range(len(self.messages), 0, -1):
            outline = self._path.outline[length]
            if outline == UNSEEN or self.messages[length - 1].role is not Role.ASSISTANT:
                continue
            calls = self._with_same_tools(self._histories.answered_alike(outline))
            if calls:
                return [_Match(call=call, length=length, exact=self.repeats_answer(call)) for call in calls]
        return []

    def repeats_answer(self, call: ModelCall) -> bool:
        """Whether the history begins with the call's messages and answer, thoughts included."""
        theirs = self._histories.answered(call)
        if theirs is None or theirs.length > len(self.messages):
            return False
        return theirs.exact == self._path.exact[theirs.length]

    def same_tools(self, call: ModelCall) -> bool:
        """Whether the call was offered the same tools."""
        return self._histories.tools(call.conversation.tools, known=True) == self._tools

    def _with_same_tools(self, call_ids: Iterable[str]) -> list[ModelCall]:
        calls = [self.by_id[call_id] for call_id in call_ids if call_id in self.by_id]
        return sorted(filter(self.same_tools, calls), key=_arrival)


def _repeated(asked: _Asked, said: Announcement) -> ModelCall | None:
    """The first known call with the very same request by the same agent: this one is its sibling."""
    return next((call for call in asked.repeats() if _agent(call) == said.subagent), None)


def _parent(asked: _Asked, said: Announcement) -> _Match | None:
    """The call that covers most of the history; of equals an exact one, of the same agent, delivered, the last."""
    # Of equals the last: `max` would take the first.
    return max(
        reversed(asked.continues()),
        key=lambda match: (
            match.exact,
            _agent(match.call) == said.subagent,
            match.call.status is CallStatus.COMPLETE,
        ),
        default=None,
    )


def _restored(parent: ModelCall, asked: _Asked) -> dict[int, ModelCall]:
    """Along the parent's chain: every delivered call whose messages and answer the history repeats exactly."""
    restored: dict[int, ModelCall] = {}
    call: ModelCall | None = parent
    seen: set[str] = set()
    while call is not None and call.call_id not in seen:
        seen.add(call.call_id)
        delivered = call.status is CallStatus.COMPLETE and call.finish_reason is not FinishReason.STOP_STRING
        if delivered and asked.same_tools(call) and asked.repeats_answer(call):
            restored[len(call.conversation.messages)] = call
        call = asked.by_id.get(call.parent_call_id) if call.parent_call_id is not None else None
    return dict(sorted(restored.items()))


def _arrival(call: ModelCall) -> tuple[int, str]:
    return call.index, call.call_id


def _root(
    calls: Sequence[ModelCall],
    conversation: Conversation,
    said: Announcement,
    stated: tuple[ThreadRole, str] | None,
    opening: bool,
) -> tuple[str, ThreadRole, str]:
    """Thread, role and evidence of a conversation that continues no known answer."""
    if said.subagent is not None:
        return f"subagent:{said.subagent}", ThreadRole.SUBAGENT, said.evidence
    if stated is not None and stated[0] in _ASIDE:
        return _named(stated[0], conversation), *stated
    if stated is not None:
        # A sub-agent that only its words tell apart: its rewritten history is still the same conversation.
        rewritten = _rewritten([call for call in calls if call.role is stated[0]], conversation)
        return rewritten or (_named(stated[0], conversation), *stated)
    main = [call for call in calls if call.role is ThreadRole.MAIN]
    if not any(call.answer is not None or call.status is CallStatus.INTENT for call in main) and (opening or calls):
        # Nothing of the main conversation was delivered yet, so no code of the agent's can have run.
        return "main", ThreadRole.MAIN, "opens the session"
    if said.conversation is not None and any(
        announcement(call.request_headers).conversation == said.conversation for call in main
    ):
        return "main", ThreadRole.MAIN, "header names the main conversation"
    rewritten = _rewritten(calls, conversation)
    if rewritten is not None:
        return rewritten
    handed = _handed_over(calls, conversation)
    if handed is not None:
        return _named(handed[0], conversation), *handed
    return _named(ThreadRole.UNATTRIBUTED, conversation), ThreadRole.UNATTRIBUTED, "neither opens nor is announced"


def _handed_over(calls: Sequence[ModelCall], conversation: Conversation) -> tuple[ThreadRole, str] | None:
    """Does this conversation carry the task that a sampled call gave to a sub-agent?"""
    task = first_user(conversation)
    for call in calls:
        for words, tool in delegated(call.answer) if call.answer is not None else ():
            if len(words) >= _QUOTE and words in task:
                return ThreadRole.SUBAGENT, f"carries the task that {call.call_id} gave to {tool}"
    return None


def _rewritten(calls: Sequence[ModelCall], conversation: Conversation) -> tuple[str, ThreadRole, str] | None:
    """Is this a known conversation whose history the harness edited (dropped, merged or compacted turns)?

    Yes when it begins like it, up to and including the first user message, under the same tools or with
    a sampled answer in that beginning; when it holds all of it, a sampled answer last, under the same tools but
    another system prompt or first user message (a date or counter in it); when it quotes its first user message
    by the harness's own sign; or when it carries the answer of a compaction of this session.
    """
    best: tuple[int, ModelCall] | None = None
    # A request without an agent header is not a sub-agent's, and side requests are never rewritten, only repeated.
    candidates = [call for call in calls if call.role not in _ASIDE and _agent(call) is None]
    for call in candidates:
        theirs = call.conversation.messages + (() if call.answer is None else (call.answer,))
        common = 0
        while common < min(len(theirs), len(conversation.messages)) and same_message(
            theirs[common], conversation.messages[common]
        ):
            common += 1
        beginning = theirs[:common]
        if not any(message.role is Role.USER for message in beginning):
            continue
        sampled = any(message.role is Role.ASSISTANT for message in beginning)
        if not sampled and not same_tools(call.conversation.tools, conversation.tools):
            continue
        if best is None or common >= best[0]:
            best = common, call
    if best is not None:
        common, call = best
        return call.thread, call.role, f"rewrites {call.call_id} after {common} messages"
    elsewhere = _under_another_opening(candidates, conversation)
    if elsewhere is not None:
        call, what = elsewhere
        return call.thread, call.role, f"continues {call.call_id} under another {what}"
    for call in reversed(candidates):
        if quotes(conversation, call.conversation) and _same_start(call.conversation, conversation):
            return call.thread, call.role, f"asks {call.call_id} anew"
    for call in reversed(calls):
        if call.role is not ThreadRole.COMPACTION or call.answer is None or len(call.answer.text.strip()) < _QUOTE:
            continue
        if any(call.answer.text.strip() in message.text for message in conversation.messages):
            compacted = _compacted_thread(candidates, call, conversation)
            if compacted is not None:
                return compacted.thread, compacted.role, f"goes on from the summary of {call.call_id}"
    return None


def _under_another_opening(calls: Sequence[ModelCall], conversation: Conversation) -> tuple[ModelCall, str] | None:
    """The call whose messages and answer cover most of this history, the system prompts left out on both sides, and
    of the first user message all but the lines that changed; and which of the two changed.

    Only an answer that we gave proves that it is the same conversation; without one any client that knows the task
    could say so.
    """
    messages = _without_system(conversation.messages)
    ours = [digest_outline(message) for message in messages]
    for call in sorted(calls, key=lambda call: (len(call.conversation.messages), call.index), reverse=True):
        theirs = _without_system(call.conversation.messages)
        length = len(theirs) + 1
        if not theirs or call.answer is None or length > len(ours) or digest_outline(call.answer) != ours[length - 1]:
            continue
        if not same_tools(call.conversation.tools, conversation.tools):
            continue
        first, *rest = [digest_outline(message) for message in theirs]
        if rest != ours[1 : length - 1]:
            continue
        if first == ours[0]:
            return call, "system prompt"
        if _share_a_line(theirs[0], messages[0]):
            return call, "first message"
    return None


def _share_a_line(left: Message, right: Message) -> bool:
    """Do two user messages have a line in common that says something?"""
    if left.role is not Role.USER or right.role is not Role.USER:
        return False
    lines = [{line.strip() for line in message.text.splitlines()} - {""} for message in (left, right)]
    return not lines[0].isdisjoint(lines[1])


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages and messages[0].role is Role.SYSTEM else messages


def _compacted_thread(
    calls: Sequence[ModelCall], compaction: ModelCall, conversation: Conversation
) -> ModelCall | None:
    """The last call before the compaction that has the system prompt and tools of what goes on after it."""
    for call in reversed(calls):
        if call.index < compaction.index and _same_start(call.conversation, conversation):
            return call
    return None


def _same_start(left: Conversation, right: Conversation) -> bool:
    """Have both a system prompt, the same one, and the same tools?"""
    first, second = left.messages[:1], right.messages[:1]
    has_system = [bool(start) and start[0].role is Role.SYSTEM for start in (first, second)]
    return has_system == [True, True] and same_message(first[0], second[0]) and same_tools(left.tools, right.tools)


def _agent(call: ModelCall) -> str | None:
    """Id of the sub-agent that the call's own headers announced."""
    return announcement(call.request_headers).subagent


def _named(role: ThreadRole, conversation: Conversation) -> str:
    """A thread name that depends on the conversation alone, not on when it arrived."""
    digests = [digest_tools(conversation.tools), *map(digest_message, conversation.messages)]
    return f"{role.value}:{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:12]}"
