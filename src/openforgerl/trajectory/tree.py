"""The calls of an attempt as a tree, by tokens: what the engine saw decides, not what the messages look like."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from openforgerl.errors import ExactnessError
from openforgerl.types import Branch, CallStatus, FinishReason, ModelCall, Trajectory


def build(attempt_id: str, calls: Sequence[ModelCall]) -> Trajectory:
    """All calls in order of arrival and the root-to-leaf paths they form.

    A call's predecessor is the nearest of its history (`parent_call_id`, that one's parent, ...) whose prompt and
    sampled ids its own prompt begins with. Where the template or the harness rewrote a turn, the call so hangs
    on the last one before it, or is a root. A call without history in the record (imported) hangs on the call
    whose ids cover most of its prompt. Raises ExactnessError when a call id or an index occurs twice.
    """
    ordered = tuple(sorted(calls, key=lambda call: (call.index, call.call_id)))
    if len({call.call_id for call in ordered}) != len(ordered):
        raise ExactnessError(f"attempt {attempt_id}: a call id occurs twice among its {len(ordered)} calls")
    if len({(call.session_id, call.index) for call in ordered}) != len(ordered):
        raise ExactnessError(f"attempt {attempt_id}: two calls have the same index in the session")
    by_id = {call.call_id: call for call in ordered}
    before = {call.call_id: _predecessor(call, by_id, ordered) for call in ordered}
    inner = {found.call_id for found in before.values() if found is not None}
    branches: list[Branch] = []
    for call in ordered:
        if call.call_id in inner:
            continue
        path: list[str] = []
        at: ModelCall | None = call
        while at is not None:
            path.append(at.call_id)
            at = before[at.call_id]
        branches.append(Branch(branch_id=call.call_id, thread=call.thread, calls=tuple(reversed(path))))
    return Trajectory(attempt_id=attempt_id, calls=ordered, branches=tuple(branches))


def carried(parent: ModelCall, child: ModelCall) -> int | None:
    """How many of the parent's sampled ids stand in the child's prompt right after the parent's own prompt.

    All of them, or all but a stop token in whose place the template wrote another closing; None when the child's
    prompt does not begin so, or shows other images there (all images of one size have the same ids). Source:
    DESIGN §5, restoring what was sampled.
    """
    if child.prompt.ids[: len(parent.prompt.ids)] != parent.prompt.ids:
        return None
    return carried_on_branch(parent, child)


def carried_on_branch(parent: ModelCall, child: ModelCall) -> int | None:
    """`carried` where the child's prompt is known to begin with the parent's ids: what follows, and images, count."""
    start, ids, sampled = len(parent.prompt.ids), child.prompt.ids, parent.sampled_ids
    shown = parent.prompt.images
    if len(ids) < start or child.prompt.images[: len(shown)] != shown:
        return None
    if ids[start : start + len(sampled)] == sampled:
        return len(sampled)
    kept = len(sampled) - 1
    if parent.finish_reason is FinishReason.STOP and kept >= 0 and ids[start : start + kept] == sampled[:kept]:
        return kept
    return None


def predecessors(trajectory: Trajectory) -> dict[str, str | None]:
    """Call id → the call before it on its branches, None for a root. ExactnessError when branches disagree."""
    before: dict[str, str | None] = {}
    for branch in trajectory.branches:
        previous: str | None = None
        for call_id in branch.calls:
            if before.setdefault(call_id, previous) != previous:
                raise ExactnessError(f"attempt {trajectory.attempt_id}: branches disagree on what precedes {call_id}")
            previous = call_id
    missing = [call.call_id for call in trajectory.calls if call.call_id not in before]
    if missing or len(before) != len(trajectory.calls):
        raise ExactnessError(f"attempt {trajectory.attempt_id}: branches and calls differ ({missing[:3]})")
    return before


def follows(parent: ModelCall, child: ModelCall) -> bool:
    """Whether the child's prompt begins with all that the parent saw and sampled (see `carried`)."""
    return _restored(parent, child) or carried(parent, child) is not None


def _restored(parent: ModelCall, child: ModelCall) -> bool:
    """Whether the child's prompt says that it restored the parent's answer where the parent sampled it.

    The renderer says so only when everything before was id by id the parent's prompt, so the whole need not be
    compared here. Nothing is taken on trust: `check_exact` compares it when samples are made.
    """
    start = len(parent.prompt.ids)
    origins = child.prompt.origins
    at = bisect_left(origins, start, key=lambda span: span.start)
    return (
        at < len(origins)
        and origins[at].start == start
        and origins[at].call_id == parent.call_id
        and carried_on_branch(parent, child) is not None
    )


def _predecessor(call: ModelCall, by_id: Mapping[str, ModelCall], ordered: Sequence[ModelCall]) -> ModelCall | None:
    at = call
    while at.parent_call_id is not None:
        parent = by_id.get(at.parent_call_id)
        if parent is None or parent.index >= at.index:
            break
        if follows(parent, call):
            return parent
        at = parent
    if call.parent_call_id is not None and call.parent_call_id in by_id:
        return None
    best: tuple[tuple[int, bool, int], ModelCall] | None = None
    for other in ordered:
        if other.index >= call.index or len(other.prompt.ids) >= len(call.prompt.ids):
            continue
        found = carried(other, call)
        if not found:  # a call without a token of its own in the prompt is no evidence
            continue
        rank = (len(other.prompt.ids) + found, other.status is CallStatus.COMPLETE, other.index)
        if best is None or rank > best[0]:
            best = rank, other
    return None if best is None else best[1]
