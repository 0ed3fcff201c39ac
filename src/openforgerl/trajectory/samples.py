"""Training rows from a trajectory, and the account of every sampled token.

The fewest rows that keep the true context: one per root-to-leaf path over the calls that count. A sampled token
that several rows hold has its span in the longest of them and is plain context in the others, so it trains once
and is counted once. Every sampled token of the attempt ends as trained, masked(reason) or dropped(reason):

======================  =====================================================================================
masked, in a row
``role:<role>``         the thread's role does not train (`SamplePolicy.train_roles`)
``error``               the engine failed in this call, and the history goes on from what it gave
``off_policy:<why>``    not drawn from the policy's own distribution (source `policy` only)
``no_logprobs``         the engine gave no log-probs, here or in another call of the row (source `policy` only)
``stale``               sampled by weights more than `max_staleness` versions back (source `policy` only)
dropped, in no row
``aborted``             the client left, and no history goes on from what it got
``error``               the engine failed, and no history goes on from what it gave
``unfinished``          the process died in the call
``retry``               one of several identical requests, not the one that counts
``too_long``            its row is longer than `max_row_tokens`
``closing``             a stop token in whose place the template wrote its own closing
======================  =====================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.errors import ExactnessError, InputError
from openforgerl.trajectory.options import SamplePolicy
from openforgerl.trajectory.tree import carried_on_branch, predecessors
from openforgerl.types import (
    CallStatus,
    ModelCall,
    PlacedImage,
    Rollout,
    Sample,
    SampleSet,
    Source,
    Span,
    Totals,
    Trajectory,
    WeightsSpan,
)


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A root-to-leaf path over the calls that count."""

    path: tuple[ModelCall, ...]
    ids: tuple[int, ...]
    carried: tuple[int, ...]
    """Per call of the path: how many of its sampled ids the row holds."""

    @property
    def leaf(self) -> ModelCall:
        return self.path[-1]


def build_samples(
    trajectory: Trajectory,
    *,
    rollout: Rollout,
    source: Source,
    policy: SamplePolicy,
    weights_version: int | None = None,
) -> SampleSet:
    """The samples of an attempt with their account.

    `weights_version` is the trainer's present one, needed when `policy.max_staleness` is set (InputError without).
    Raises ExactnessError when a row would not be exactly what the engine saw and emitted, or the account does not
    add up.
    """
    if policy.max_staleness is not None and weights_version is None:
        raise InputError("max_staleness is set, so build_samples needs the trainer's weights_version")
    before = predecessors(trajectory)
    dropped = dropped_calls(trajectory, before)
    rows = _rows(trajectory, before, dropped)
    limit = policy.max_row_tokens
    fitting = [row for row in rows if limit is None or len(row.ids) <= limit]
    too_long = [row for row in rows if limit is not None and len(row.ids) > limit]

    lost: Counter[str] = Counter()
    for call in trajectory.calls:
        if call.call_id in dropped:
            lost[dropped[call.call_id]] += len(call.sampled_ids)
    covered: Counter[str] = Counter()
    samples: dict[str, Sample] = {}
    for row in sorted(fitting, key=lambda row: (-len(row.ids), -len(row.path), -row.leaf.index)):
        spans = _spans(row, covered, source=source, policy=policy, weights_version=weights_version)
        samples[row.leaf.call_id] = _sample(row, spans, trajectory, rollout, source)
    for row in too_long:
        for call, held in zip(row.path, row.carried, strict=True):
            if held > covered[call.call_id]:
                lost["too_long"] += held - covered[call.call_id]
                covered[call.call_id] = held
    for call in trajectory.calls:
        if call.call_id not in dropped:
            lost["closing"] += len(call.sampled_ids) - covered[call.call_id]

    ordered = tuple(samples[row.leaf.call_id] for row in fitting)
    calls = {call.call_id: call for call in trajectory.calls}
    for sample in ordered:
        check_exact(sample, calls)
    return SampleSet(samples=ordered, totals=account(ordered, trajectory.calls, lost))


def check_exact(sample: Sample, calls: Mapping[str, ModelCall]) -> None:
    """ExactnessError unless every span is what its call sampled, after exactly the context that call saw."""
    position = 0
    for span in sample.spans:
        call = calls.get(span.call_id)
        if call is None:
            raise ExactnessError(f"sample {sample.sample_id}: call {span.call_id} of a span is not in the record")
        length = span.stop - span.start
        if sample.ids[span.start : span.stop] != call.sampled_ids[span.offset : span.offset + length]:
            raise ExactnessError(
                f"sample {sample.sample_id}: ids [{span.start}, {span.stop}) are not what call {span.call_id} sampled "
                f"from {span.offset} on"
            )
        if not _as_seen(sample, span, call):
            raise ExactnessError(
                f"sample {sample.sample_id}: what stands before id {span.start} is not what the engine saw when call "
                f"{span.call_id} sampled it"
            )
        if sample.logprobs is not None:
            theirs = call.logprobs[span.offset : span.offset + length] if call.logprobs is not None else None
            if sample.logprobs[position : position + length] != theirs:
                raise ExactnessError(
                    f"sample {sample.sample_id}: log-probs of [{span.start}, {span.stop}) are not those of call "
                    f"{span.call_id}"
                )
        position += length


def _as_seen(sample: Sample, span: Span, call: ModelCall) -> bool:
    """Whether what stands before the span is the call's prompt and what it had sampled until then.

    Piece by piece: to join the two first would cost as much as the comparison, for every call of a long row.
    """
    prompt, shown = call.prompt.ids, call.prompt.images
    at = len(prompt)
    return (
        span.start == at + span.offset
        and sample.ids[at : span.start] == call.sampled_ids[: span.offset]
        and sample.images[: len(shown)] == shown
        and sample.ids[:at] == prompt
    )


def account(samples: Sequence[Sample], calls: Sequence[ModelCall], dropped: Mapping[str, int]) -> Totals:
    """Totals of an attempt; ExactnessError when a token is counted twice or not at all."""
    masked: Counter[str] = Counter()
    trained = 0
    seen: set[tuple[str, int]] = set()
    for span in (span for sample in samples for span in sample.spans):
        length = span.stop - span.start
        tokens = {(span.call_id, span.offset + position) for position in range(length)}
        if tokens & seen:
            raise ExactnessError(f"tokens of call {span.call_id} lie in two spans")
        seen |= tokens
        if span.reason is None:
            trained += length
        else:
            masked[span.reason] += length
    try:
        return Totals(
            sampled=sum(len(call.sampled_ids) for call in calls),
            trained=trained,
            masked=dict(sorted(masked.items())),
            dropped={reason: count for reason, count in sorted(dropped.items()) if count},
        )
    except ValueError as error:
        raise ExactnessError(f"the account of sampled tokens does not add up: {error}") from error


def dropped_calls(trajectory: Trajectory, before: Mapping[str, str | None]) -> dict[str, str]:
    """Call id → why none of its tokens are in a row of their own.

    History goes on from a call when a later one follows it token by token, or repeats its answer (then a row of
    its own holds it, because the template wrote that turn differently afterwards).
    """
    continued = {call_id for call_id in before.values() if call_id is not None}
    continued |= {call.parent_call_id for call in trajectory.calls if call.parent_call_id is not None}
    dropped: dict[str, str] = {}
    asked: list[ModelCall] = []
    for call in trajectory.calls:
        if call.status is CallStatus.INTENT and call.call_id not in continued:
            dropped[call.call_id] = "unfinished"
        else:
            asked.append(call)
    for identical in _requests(asked):
        alive = [call for call in identical if call.call_id in continued]
        if not alive:
            alive = [call for call in identical if call.status is CallStatus.COMPLETE][-1:]
        for call in identical:
            if call in alive:
                continue
            if call.status is CallStatus.COMPLETE:
                dropped[call.call_id] = "retry"
            else:
                dropped[call.call_id] = "aborted" if call.status is CallStatus.ABORTED else "error"
    return dropped


def _requests(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """The calls, those with one and the same request of one thread together.

    By length first: to hash every prompt would cost more than all else that is done with it.
    """
    groups: dict[tuple[str, int, tuple[PlacedImage, ...]], list[list[ModelCall]]] = {}
    for call in calls:
        known = groups.setdefault((call.thread, len(call.prompt.ids), call.prompt.images), [])
        same = next((group for group in known if group[0].prompt.ids == call.prompt.ids), None)
        if same is None:
            known.append([call])
        else:
            same.append(call)
    return [group for known in groups.values() for group in known]


def _rows(trajectory: Trajectory, before: Mapping[str, str | None], dropped: Mapping[str, str]) -> list[_Row]:
    calls = {call.call_id: call for call in trajectory.calls}
    inner = {before[call_id] for call_id in calls if call_id not in dropped}
    rows: list[_Row] = []
    for leaf in trajectory.calls:
        if leaf.call_id in dropped or leaf.call_id in inner:
            continue
        path = [leaf]
        while (previous := before[path[-1].call_id]) is not None:
            path.append(calls[previous])
        path.reverse()
        # The branches say that every prompt begins with the one before it; `check_exact` compares it at the end.
        counts: list[int] = []
        for call in path[:-1]:
            count = carried_on_branch(call, leaf)
            if count is None:
                raise ExactnessError(
                    f"attempt {trajectory.attempt_id}: the prompt of call {leaf.call_id} does not begin with what call "
                    f"{call.call_id} saw and sampled"
                )
            counts.append(count)
        rows.append(
            _Row(
                path=tuple(path),
                ids=leaf.prompt.ids + leaf.sampled_ids,
                carried=(*counts, len(leaf.sampled_ids)),
            )
        )
    return rows


def _spans(
    row: _Row,
    covered: Counter[str],
    *,
    source: Source,
    policy: SamplePolicy,
    weights_version: int | None,
) -> list[Span]:
    """Spans of the row's tokens that no longer row holds; `covered` learns of them."""
    new = [
        (call, covered[call.call_id], held)
        for call, held in zip(row.path, row.carried, strict=True)
        if held > covered[call.call_id]
    ]
    blind = source is Source.POLICY and any(call.logprobs is None for call, _, _ in new)
    spans: list[Span] = []
    for call, start, stop in new:
        covered[call.call_id] = stop
        for piece in _weights(call):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            stale = (
                policy.max_staleness is not None
                and weights_version is not None
                and weights_version - piece.version > policy.max_staleness
            )
            reason = _mask(call, source=source, policy=policy, blind=blind, stale=stale)
            spans.append(
                Span(
                    start=len(call.prompt.ids) + low,
                    stop=len(call.prompt.ids) + high,
                    call_id=call.call_id,
                    offset=low,
                    state="trained" if reason is None else "masked",
                    reason=reason,
                    weights_version=piece.version,
                )
            )
    return spans


def _mask(call: ModelCall, *, source: Source, policy: SamplePolicy, blind: bool, stale: bool) -> str | None:
    """Why a call's tokens do not train, or None. One reason each: the first that holds."""
    if call.role not in policy.train_roles:
        return f"role:{call.role.value}"
    if call.status is CallStatus.ERROR:
        return "error"
    if source is not Source.POLICY:
        return None
    if call.off_policy is not None:
        return f"off_policy:{call.off_policy}"
    if blind:
        return "no_logprobs"
    return "stale" if stale else None


def _weights(call: ModelCall) -> Sequence[WeightsSpan]:
    """Which weights sampled which ids, covering all of them."""
    length = len(call.sampled_ids)
    pieces: list[WeightsSpan] = []
    at = 0
    for piece in call.weights_spans:
        if piece.start != at or piece.stop <= piece.start:
            raise ExactnessError(f"call {call.call_id}: weights spans leave a gap or overlap at id {at}")
        pieces.append(piece)
        at = piece.stop
    if pieces and at != length:
        raise ExactnessError(f"call {call.call_id}: weights spans cover {at} of {length} ids")
    return pieces or [WeightsSpan(start=0, stop=length, version=call.weights_version)]


def _sample(row: _Row, spans: Sequence[Span], trajectory: Trajectory, rollout: Rollout, source: Source) -> Sample:
    calls = {call.call_id: call for call in row.path}
    logprobs: list[float] | None = []
    for span in spans:
        values = calls[span.call_id].logprobs
        if values is None:
            # A row has log-probs for all its spans or none; they are never invented.
            logprobs = None
            break
        logprobs.extend(values[span.offset : span.offset + span.stop - span.start])
    return Sample(
        sample_id=f"{trajectory.attempt_id}/{row.leaf.call_id}",
        attempt_id=trajectory.attempt_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        ids=row.ids,
        spans=tuple(spans),
        logprobs=None if logprobs is None else tuple(logprobs),
        source=source,
        images=row.leaf.prompt.images,
        template_digest=row.leaf.prompt.template_digest,
    )
