"""A group of rollouts as rows for a trainer that is not ours: exact ids, mask, log-probs, versions, images. Pure.

The last row of a rollout is the one with most trained tokens, and speaks for it. veRL (0.9, v1 trainer) keeps a
rollout as one or more rows under keys `{prompt}_{rollout}_{index}`; the last one carries the reward, enters the group's
statistics, and its advantage is given to the others (`compute_advantage_for_multi_trajectories`), read at its first
trained token. TRL and OpenRLHF take one row for a rollout: the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openforgerl.errors import ExactnessError, InputError
from openforgerl.rendering.images import Placeholders
from openforgerl.types import Attempt, PlacedImage, Rollout, Sample, Source, Span, Verdict

Group = Sequence[tuple[Rollout, Attempt, Sequence[Sample]]]


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
    images: tuple[PlacedImage, ...] = ()
    """In order of appearance; `start` counts from the beginning of the prompt."""

    @property
    def trained_tokens(self) -> int:
        return sum(self.response_mask)


@dataclass(frozen=True, slots=True)
class GradedRollout:
    """A rollout of a complete group, with its reward."""

    rollout: Rollout
    attempt: Attempt
    verdict: Verdict
    samples: tuple[Sample, ...]
    rows: tuple[Row, ...]
    """At least one; see `rows_of`."""

    @property
    def row(self) -> Row:
        """The one that stands for the rollout where a trainer takes no more than one."""
        return self.rows[-1]

    @property
    def left_out(self) -> int:
        """Trained tokens that are not in `row`."""
        return sum(row.trained_tokens for row in self.rows[:-1])

    @property
    def sampled(self) -> tuple[Sample, ...]:
        """Samples in which something was sampled; of a rollout without any, one of two ids in which nothing trains."""
        found = tuple(sample for sample in self.samples if sample.spans)
        return found or (_placeholder(self.rollout, self.attempt),)


def graded(group: Group, seeing: Placeholders | None = None) -> list[GradedRollout]:
    """The rollouts of a complete group with their rows.

    `seeing`: how the model's prompts hold images; None for a model that sees none. Raises ExactnessError for an
    attempt without a verdict and for a sample that is not what it says, InputError as `rows_of` does.
    """
    found: list[GradedRollout] = []
    for rollout, attempt, samples in group:
        if not isinstance(attempt.outcome, Verdict):
            raise ExactnessError(f"attempt {attempt.attempt_id} has no verdict, so it has no reward and cannot train")
        rows = rows_of(samples, version=attempt.weights_version, seeing=seeing)
        found.append(GradedRollout(rollout, attempt, attempt.outcome, tuple(samples), tuple(rows)))
    return found


def rows_of(samples: Sequence[Sample], *, version: int, seeing: Placeholders | None = None) -> list[Row]:
    """The rows of one rollout, the one with most trained tokens last, which veRL asks for its advantage.

    Samples without a trained token are left out, because they teach nothing, and so are those in which the model
    sampled a placeholder of an image itself: no image is behind it, and no trainer can score what follows. A rollout
    that has no other is one row of two ids with nothing trained, so that its reward still belongs to its group.
    `version` is told of that row. Raises ExactnessError for a sample that is not the policy's, has no log-probs, or
    whose images do not fit its ids; InputError for images without `seeing`.
    """
    for sample in samples:
        if sample.source is not Source.POLICY:
            raise ExactnessError(f"sample {sample.sample_id} is {sample.source}'s work, not the policy's")
        if sample.images and seeing is None:
            raise InputError(f"sample {sample.sample_id} holds images, and this model sees none")
    fit = [sample for sample in samples if sample.trained_tokens and (seeing is None or _seen(sample, seeing))]
    fit.sort(key=lambda sample: sample.trained_tokens)
    if fit:
        return [_row(sample) for sample in fit]
    longest = max(samples, key=lambda sample: len(sample.ids), default=None)
    ids = (*(longest.ids if longest and not longest.images else ()), 0, 0)[:2]
    return [Row(longest.sample_id if longest else "", ids[:1], ids[1:], (0,), (0.0,), (version, version))]


def _seen(sample: Sample, seeing: Placeholders) -> bool:
    """Whether every placeholder stands for a patch of an image. ExactnessError when what we placed does not fit."""
    left = {place for place, id in enumerate(sample.ids) if id == seeing.token_id}
    at = 0
    for image in sample.images:
        places = range(image.start, image.start + image.count)
        if image.start < at or image.count != seeing.rules.count(image.grid) or not left.issuperset(places):
            raise ExactnessError(
                f"sample {sample.sample_id}: image {image.sha256[:12]} of grid {image.grid} takes "
                f"{seeing.rules.count(image.grid)} placeholders, and {image.count} are said to be at {image.start}"
            )
        left.difference_update(places)
        at = places.stop
    sampled = {place for span in sample.spans for place in range(span.start, span.stop)}
    if left - sampled:
        raise ExactnessError(f"sample {sample.sample_id}: no image is behind the placeholders at {sorted(left)[:3]}")
    return not left


def _placeholder(rollout: Rollout, attempt: Attempt) -> Sample:
    nothing = Span(start=1, stop=2, call_id="", offset=0, state="masked", reason="nothing sampled")
    return Sample(
        sample_id=f"{attempt.attempt_id}-nothing",
        attempt_id=attempt.attempt_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        ids=(0, 0),
        spans=(nothing,),
        logprobs=(0.0,),
        source=Source.POLICY,
    )


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
        images=sample.images,
    )


def _write(mask: list[int], logprobs: list[float], span: Span, first: int, values: Sequence[float]) -> None:
    """Put a span into the response; what of it lies in the prompt (masked, before anything trains) is left out."""
    for place, value in zip(range(span.start - first, span.stop - first), values, strict=True):
        if place >= 0:
            logprobs[place] = value
            mask[place] = int(span.state == "trained")
