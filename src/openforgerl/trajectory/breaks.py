"""Why a row ends where the harness thinks that its conversation goes on, and what a harness's owner could change.

A call breaks off from the one before it in its thread when its prompt does not begin with what that one saw and
sampled. The row is then another one, as it must be: the model saw another context. Named is the first thing that
differs: in the messages, else in what the template made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.trajectory.differences import Cause, Difference, first_difference
from openforgerl.trajectory.tree import predecessors
from openforgerl.types import Conversation, ModelCall, ThreadRole, Trajectory


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
        found.append(broken(expected, call, by_id))
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


def broken(expected: ModelCall, call: ModelCall, by_id: Mapping[str, ModelCall]) -> Break:
    """Why `call`, which goes on where `expected` left off, is another row. `by_id`: the calls of the session."""
    answer = () if expected.answer is None else (expected.answer,)
    whole = Conversation(messages=expected.conversation.messages + answer, tools=expected.conversation.tools)
    compactions = [known for known in by_id.values() if known.role is ThreadRole.COMPACTION]
    summaries = [known.answer.text for known in compactions if known.answer is not None]
    found = first_difference(whole, call.conversation, summaries=summaries) or _of_template(expected, call, by_id)
    return Break(
        call_id=call.call_id,
        after=expected.call_id,
        thread=call.thread,
        cause=found.cause,
        where=found.where,
        before=found.before,
        now=found.now,
        common=_common(expected, call),
    )


def _of_template(expected: ModelCall, call: ModelCall, by_id: Mapping[str, ModelCall]) -> Difference:
    """The messages are the same, the ids are not: whose turn did the template write differently?"""
    at = _common(expected, call)
    owner = expected if at >= len(expected.prompt.ids) else None
    for span in expected.prompt.origins:
        if span.start <= at < span.stop and span.call_id is not None:
            owner = by_id.get(span.call_id)
    where = f"id {at} of the prompt"
    if owner is None:
        return Difference(cause="template", where=where)
    if owner.answer is not None and owner.answer.reasoning:
        thought = f"the thought of call {owner.call_id}"
        return Difference(cause="thought_stripped_by_template", where=where, before=thought)
    return Difference(cause="turn_not_restored", where=where, before=f"the turn of call {owner.call_id}")


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
