"""Why a row ends where the harness thinks that its conversation goes on, and what a harness's owner could change.

A call breaks off from the one before it in its thread when its prompt does not begin with what that one saw and
sampled. The row is then another one, as it must be: the model saw another context. Named is the first thing that
differs: in the messages, else in what the template made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from openforgerl.trajectory.differences import Cause, Difference, first_difference
from openforgerl.trajectory.tree import follows, predecessors
from openforgerl.types import Conversation, ModelCall, ThreadRole, Trajectory

BROKEN = "prefix broken: "
"""What the warning of a call begins with that broke off from its conversation while the session ran; then the cause."""


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
    known: dict[str, ModelCall] = {call.call_id: call for call in trajectory.calls}
    watch = PrefixWatch()
    found = [watch.look(call, before[call.call_id], known) for call in trajectory.calls]
    return [one for one in found if one is not None]


def count_breaks(calls: Iterable[ModelCall]) -> dict[str, int]:
    """Cause → calls that were warned about it when they came in."""
    causes = [warning.removeprefix(BROKEN) for call in calls for warning in call.warnings if warning.startswith(BROKEN)]
    return dict(sorted(Counter(causes).items()))


class PrefixWatch:
    """Looks at a session's calls one after the other, in order of arrival."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        self._last: dict[str, str] = {}
        """Thread → its last call."""
        self._children: dict[str, list[str]] = {}

    def arrived(self, call: ModelCall, known: Mapping[str, ModelCall]) -> Break | None:
        """`look` while the session runs. `known`: all earlier calls as they stand now.

        A call that continues none that is known counts as a root: to compare it with every earlier prompt, as the
        tree does in the end, would hold up the calls that wait.
        """
        parent = known.get(call.parent_call_id or "")
        return self.look(call, parent.call_id if parent is not None and follows(parent, call) else None, known)

    def look(self, call: ModelCall, previous: str | None, known: Mapping[str, ModelCall]) -> Break | None:
        """The break at this call, or None. `previous`: the call before it on its branch, None for a root."""
        self._before[call.call_id] = previous
        expected = self._expected(call, previous, known)
        self._last[call.thread] = call.call_id
        self._children.setdefault(previous or "", []).append(call.call_id)
        if expected is None or _same_prompt(call, expected):
            return None
        if call.thread != expected.thread and call.role in (ThreadRole.SIDE, ThreadRole.COMPACTION):
            return None  # an aside that repeats the conversation and asks about it
        return _broken(expected, call, known)

    def _expected(self, call: ModelCall, previous: str | None, known: Mapping[str, ModelCall]) -> ModelCall | None:
        """The call that `call` would have continued, if nothing had been rewritten; None when it does continue one.

        A harness that changes an old turn goes on from the calls before that turn, which then have two continuations;
        two answers to one request that both go on do not make one.
        """
        last = known.get(self._last.get(call.thread, ""))
        if previous is None or (call.parent_call_id is not None and previous != call.parent_call_id):
            return known.get(call.parent_call_id or "") or last
        siblings = [known[name] for name in self._children.get(previous, ()) if name in known]
        others = [child for child in siblings if child.thread == call.thread and not _same_prompt(child, call)]
        if not others:
            return None
        at = None if last is None else last.call_id
        while at is not None and at != previous:
            at = self._before[at]
        return others[-1] if at is None else last


def _same_prompt(left: ModelCall, right: ModelCall) -> bool:
    return left.prompt.ids == right.prompt.ids and left.prompt.images == right.prompt.images


def _broken(expected: ModelCall, call: ModelCall, by_id: Mapping[str, ModelCall]) -> Break:
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
