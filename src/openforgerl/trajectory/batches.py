"""Many attempts' samples together: what is too old by now, and where every sampled token of a batch went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from openforgerl.errors import ExactnessError
from openforgerl.types import Sample, Span, Totals

STALE = "stale"
SKIPPED = "nothing_to_compare"
"""Why the tokens of a group whose rewards are all equal do not train: their advantage is 0."""


def mask_stale(samples: Sequence[Sample], weights_version: int, max_staleness: int | None) -> tuple[Sample, ...]:
    """The samples with trained tokens masked whose weights are more than `max_staleness` versions back.

    They stay in their rows, as the context that they are. None = any age. Doing it again changes nothing.
    """
    if max_staleness is None:
        return tuple(samples)
    oldest = weights_version - max_staleness
    return tuple(_masked(sample, oldest) for sample in samples)


def batch_totals(
    attempts: Mapping[str, Totals], samples: Iterable[Sample], *, trained: int, skipped: int = 0
) -> Totals:
    """The account of a batch: every sampled token of its attempts, once.

    `attempts`: attempt id → its own account, with what is in no row. `samples`: the rows of these attempts as the
    trainer got them. `trained`: tokens that a loss saw. `skipped`: trainable ones of rows that were left out because
    there is nothing to compare. ExactnessError when a row is of no such attempt or the sums differ.
    """
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for sample in samples:
        if sample.attempt_id not in attempts:
            raise ExactnessError(f"sample {sample.sample_id}: attempt {sample.attempt_id} is not of this batch")
        for span in sample.spans:
            if span.reason is not None:
                masked[span.reason] += span.stop - span.start
    if skipped:
        masked[SKIPPED] += skipped
    for totals in attempts.values():
        dropped.update(totals.dropped)
    try:
        return Totals(
            sampled=sum(totals.sampled for totals in attempts.values()),
            trained=trained,
            masked=dict(sorted(masked.items())),
            dropped=dict(sorted(dropped.items())),
        )
    except ValueError as error:
        raise ExactnessError(f"the account of a batch of {len(attempts)} attempts does not add up: {error}") from error


def _masked(sample: Sample, oldest: int) -> Sample:
    spans = tuple(_stale(span, oldest) for span in sample.spans)
    return sample if spans == sample.spans else msgspec.structs.replace(sample, spans=spans)


def _stale(span: Span, oldest: int) -> Span:
    if span.state == "masked" or span.weights_version >= oldest:
        return span
    return msgspec.structs.replace(span, state="masked", reason=STALE)
