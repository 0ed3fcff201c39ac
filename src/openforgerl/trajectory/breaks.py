"""Why a row ends where the harness thinks that its conversation goes on, and what a harness's owner could change.

A call breaks off from the one before it in its thread when its prompt does not begin with what that one saw and
sampled. The row is then another one, as it must be: the model saw another context. Named is the first thing that
differs: in the messages, else in what the template made of them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from openforgerl.conversation import digest_outline, same_message, same_tools
from openforgerl.trajectory.tree import predecessors
from openforgerl.types import (
    Message,
    ModelCall,
    Role,
    ThreadRole,
    ToolSpec,
    Trajectory,
)

Cause = Literal[
    "tools_changed",
    "system_prompt_changed",
    "reasoning_dropped",
    "arguments_changed",
    "unicode_normalised",
    "spaces_trimmed",
    "answer_edited",
    "observation_edited",
    "compacted",
    "history_edited",
    "thought_stripped_by_template",
    "turn_not_restored",
    "template",
]
"""What broke a prefix: what the harness did, and then the three that the chat template did."""

_AROUND = 16
_SHOWN = 48


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """One call that does not go on from the call before it in its thread."""

    call_id: str
    after: str
    """The call it would have continued."""
    thread: str
    cause: Cause
    where: str
    """`tools`, `messages[3]`, or `id 512` of the prompt."""
    before: str = ""
    """What stood there, around the first difference."""
    now: str = ""
    common: int
    """Ids that the prompt shares with what the call before saw and sampled."""


def find_breaks(trajectory: Trajectory) -> list[Break]:
    """Every break, in order of arrival. Retries of one request, and a thread's first call, are none."""
    before = predecessors(trajectory)
    by_id = {call.call_id: call for call in trajectory.calls}
    last: dict[str, ModelCall] = {}
    children: dict[str, list[ModelCall]] = {}
    found: list[Break] = []
    for call in trajectory.calls:
        expected = _expected(call, last.get(call.thread), before, by_id, children)
        last[call.thread] = call
        children.setdefault(before[call.call_id] or "", []).append(call)
        if expected is None or _same_prompt(call, expected):
            continue
        if call.thread != expected.thread and call.role in (ThreadRole.SIDE, ThreadRole.COMPACTION):
            continue  # an aside that repeats the conversation and asks about it
        cause, where, was, now = _cause(expected, call, by_id)
        found.append(
            Break(
                call_id=call.call_id,
                after=expected.call_id,
                thread=call.thread,
                cause=cause,
                where=where,
                before=was,
                now=now,
                common=_common(expected, call),
            )
        )
    return found


def _expected(
    call: ModelCall,
    last: ModelCall | None,
    before: Mapping[str, str | None],
    by_id: Mapping[str, ModelCall],
    children: Mapping[str, Sequence[ModelCall]],
) -> ModelCall | None:
    """The call that `call` would have continued, if nothing had been rewritten; None when it does continue one.

    A harness that changes an old turn goes on from the calls before that turn, which then have two continuations;
    two answers to one request that both go on do not make one.
    """
    previous = before[call.call_id]
    if previous is None or (call.parent_call_id is not None and previous != call.parent_call_id):
        return by_id.get(call.parent_call_id or "") or last
    siblings = children.get(previous, ())
    others = [child for child in siblings if child.thread == call.thread and not _same_prompt(child, call)]
    if not others:
        return None
    at = None if last is None else last.call_id
    while at is not None and at != previous:
        at = before[at]
    return others[-1] if at is None else last


def _same_prompt(left: ModelCall, right: ModelCall) -> bool:
    return left.prompt.ids == right.prompt.ids and left.prompt.images == right.prompt.images


def _cause(expected: ModelCall, call: ModelCall, by_id: Mapping[str, ModelCall]) -> tuple[Cause, str, str, str]:
    """Cause, place, and the two texts around the first difference."""
    if not same_tools(expected.conversation.tools, call.conversation.tools):
        was, now = _tool_difference(expected.conversation.tools, call.conversation.tools)
        return "tools_changed", "tools", was, now
    theirs = expected.conversation.messages + (() if expected.answer is None else (expected.answer,))
    ours = call.conversation.messages
    at = 0
    while at < min(len(theirs), len(ours)) and same_message(theirs[at], ours[at]):
        at += 1
    if at == len(theirs):
        return _template_cause(expected, call, by_id)
    where = f"messages[{at}]"
    if at == len(ours):
        return "history_edited", where, _shown(theirs[at].text), ""
    left, right = theirs[at], ours[at]
    cause = "compacted" if _summarised(ours[at:], by_id.values()) else _message_cause(left, right)
    if cause == "reasoning_dropped":
        was, now = _difference(left.reasoning, right.reasoning)
    elif cause == "arguments_changed":
        was, now = _difference(*(" ".join(made.arguments for made in side.tool_calls) for side in (left, right)))
    else:
        was, now = _difference(left.text, right.text)
    return cause, where, was, now


def _message_cause(left: Message, right: Message) -> Cause:
    if left.role is not right.role:
        return "history_edited"
    if left.role is Role.SYSTEM:
        return "system_prompt_changed"
    if left.role is not Role.ASSISTANT:
        return "observation_edited"
    if digest_outline(left) == digest_outline(right):
        return "reasoning_dropped"
    if left.text == right.text:
        return "arguments_changed"
    if unicodedata.normalize("NFC", left.text) == unicodedata.normalize("NFC", right.text):
        return "unicode_normalised"
    if left.text.strip() == right.text.strip():
        return "spaces_trimmed"
    return "answer_edited"


def _summarised(messages: Sequence[Message], calls: Iterable[ModelCall]) -> bool:
    """Whether these messages hold the answer of a compaction of this session."""
    summaries = [
        call.answer.text.strip() for call in calls if call.role is ThreadRole.COMPACTION and call.answer is not None
    ]
    return any(summary and summary in message.text for summary in summaries for message in messages)


def _template_cause(
    expected: ModelCall, call: ModelCall, by_id: Mapping[str, ModelCall]
) -> tuple[Cause, str, str, str]:
    """The messages are the same, the ids are not: whose turn did the template write differently?"""
    at = _common(expected, call)
    owner = expected if at >= len(expected.prompt.ids) else None
    for span in expected.prompt.origins:
        if span.start <= at < span.stop and span.call_id is not None:
            owner = by_id.get(span.call_id)
    where = f"id {at} of the prompt"
    if owner is None:
        return "template", where, "", ""
    if owner.answer is not None and owner.answer.reasoning:
        return "thought_stripped_by_template", where, f"the thought of call {owner.call_id}", ""
    return "turn_not_restored", where, f"the turn of call {owner.call_id}", ""


def _common(expected: ModelCall, call: ModelCall) -> int:
    """Ids that the call's prompt begins with in common with what the expected call saw and sampled."""
    left, right = expected.prompt.ids + expected.sampled_ids, call.prompt.ids
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tool_difference(left: Sequence[ToolSpec], right: Sequence[ToolSpec]) -> tuple[str, str]:
    """Names only on one side; of a tool that is on both but differs, or of another order, the names as listed."""
    names = [tool.name for tool in left], [tool.name for tool in right]
    gone = [name for name in names[0] if name not in names[1]]
    new = [name for name in names[1] if name not in names[0]]
    if not gone and not new:
        ours = {tool.name: tool for tool in right}
        gone = new = [tool.name for tool in left if not same_tools((tool,), (ours[tool.name],))]
    if not gone and not new:
        gone, new = names
    return _shown(", ".join(gone)), _shown(", ".join(new))


def _difference(left: str, right: str) -> tuple[str, str]:
    """Both texts around their first difference."""
    at = 0
    while at < min(len(left), len(right)) and left[at] == right[at]:
        at += 1
    start = max(0, at - _AROUND)
    return _shown(left[start:]), _shown(right[start:])


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
