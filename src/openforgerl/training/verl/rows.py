"""A rollout as the rows that veRL trains: exact ids, mask, log-probs and weights versions. Pure.

veRL (0.9, v1 trainer) keeps a rollout as one or more rows under keys `{prompt}_{rollout}_{index}`. The last row
speaks for the rollout: it carries the reward, enters the group's statistics, and its advantage is given to the
others (`compute_advantage_for_multi_trajectories`), read at its first trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openforgerl.errors import ExactnessError, InputError
from openforgerl.types import Sample, Source, Span


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence. The prompt ends where the first trained token begins; everything after it is the response."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 = trained."""
    response_logprobs: tuple[float, ...]
    """As recorded, for masked span tokens too; 0 for context."""
    versions: tuple[int, int]
    """Oldest and newest weights that sampled a trained token (of the rollout, when the row has none)."""


def rows_of(samples: Sequence[Sample], *, version: int) -> list[Row]:
    """The rows of one rollout, the one with most trained tokens last, which veRL asks for its advantage.

    Samples without a trained token are left out, because they teach nothing; a rollout that has no other is one row
    of two ids with nothing trained, so that its reward still belongs to its group. `version` is told of that row.
    Raises ExactnessError for a sample that is not the policy's or has no log-probs, InputError for one with images.
    """
    for sample in samples:
        if sample.source is not Source.POLICY:
            raise ExactnessError(f"sample {sample.sample_id} is {sample.source}'s work, not the policy's")
        if sample.images:
            raise InputError(f"sample {sample.sample_id}: images cannot be trained through veRL yet")
    trained = sorted((sample for sample in samples if sample.trained_tokens), key=lambda sample: sample.trained_tokens)
    if trained:
        return [_row(sample) for sample in trained]
    longest = max(samples, key=lambda sample: len(sample.ids), default=None)
    ids = (*(longest.ids if longest else ()), 0, 0)[:2]
    return [Row(longest.sample_id if longest else "", ids[:1], ids[1:], (0,), (0.0,), (version, version))]


def _row(sample: Sample) -> Row:
    if sample.logprobs is None:
        raise ExactnessError(f"sample {sample.sample_id} trains but has no log-probs")
    trained = [span for span in sample.spans if span.state == "trained"]
    first = trained[0].start
    if first == 0:
        raise InputError(f"sample {sample.sample_id}: its first id is trained but has no context to be predicted from")
    length = len(sample.ids) - first
    mask, logprobs = [0] * length, [0.0] * length
    at = 0
    for span in sample.spans:
        size = span.stop - span.start
        _write(mask, logprobs, span, first, sample.logprobs[at : at + size])
        at += size
    versions = [span.weights_version for span in trained]
    return Row(
        sample_id=sample.sample_id,
        prompt_ids=sample.ids[:first],
        response_ids=sample.ids[first:],
        response_mask=tuple(mask),
        response_logprobs=tuple(logprobs),
        versions=(min(versions), max(versions)),
    )


def _write(mask: list[int], logprobs: list[float], span: Span, first: int, values: Sequence[float]) -> None:
    """Put a span into the response; what of it lies in the prompt (masked, before anything trains) is left out."""
    for place, value in zip(range(span.start - first, span.stop - first), values, strict=True):
        if place >= 0:
            logprobs[place] = value
            mask[place] = int(span.state == "trained")
