"""What goes into an export, and what an export says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from openforgerl.types import Attempt, ModelCall, Rollout, Sample, SampleSet, Verdict

Decode = Callable[[Sequence[int]], str]
"""Token ids → their text, added tokens included."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One graded attempt with everything that is known of it."""

    rollout: Rollout
    attempt: Attempt
    verdict: Verdict
    calls: tuple[ModelCall, ...]
    """In order of arrival."""
    samples: SampleSet


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds, and what of the record it does not."""

    attempts: int
    """With at least one row."""
    rows: int
    tokens: int
    """Ids of all rows."""
    trained_tokens: int
    lost: dict[str, int]
    """What the format has no place for, or the writer left out → how many of it."""


class Tally:
    """Counts for a report."""

    def __init__(self) -> None:
        self._attempts: set[str] = set()
        self._rows = 0
        self._tokens = 0
        self._trained = 0
        self._lost: Counter[str] = Counter()

    def row(self, sample: Sample) -> None:
        """A sample is written as one row."""
        self._attempts.add(sample.attempt_id)
        self._rows += 1
        self._tokens += len(sample.ids)
        self._trained += sample.trained_tokens

    def lost(self, what: str, count: int = 1) -> None:
        """`count` of `what` are not in the export."""
        if count:
            self._lost[what] += count

    def report(self) -> Report:
        """The counts so far."""
        return Report(
            attempts=len(self._attempts),
            rows=self._rows,
            tokens=self._tokens,
            trained_tokens=self._trained,
            lost=dict(sorted(self._lost.items())),
        )


class Writer(Protocol):
    """Writes one export. Nothing is visible under its final name before `close`."""

    def add(self, record: AttemptRecord) -> None:
        """Append an attempt's rows."""
        ...

    def close(self) -> Report:
        """Finish the files and give them their name."""
        ...

    def abandon(self) -> None:
        """Remove what was written. After `close` this does nothing."""
        ...


def trained_mask(sample: Sample) -> list[int]:
    """1 for every id of the row that trains, else 0."""
    mask = [0] * len(sample.ids)
    for span in sample.spans:
        if span.state == "trained":
            mask[span.start : span.stop] = [1] * (span.stop - span.start)
    return mask


def row_logprobs(sample: Sample) -> list[float] | None:
    """The recorded log-prob of every id in a span, trained or masked; 0.0 for context. None when the row has none."""
    if sample.logprobs is None:
        return None
    values = [0.0] * len(sample.ids)
    at = 0
    for span in sample.spans:
        length = span.stop - span.start
        values[span.start : span.stop] = sample.logprobs[at : at + length]
        at += length
    return values


def span_logprobs(sample_ids: int, spans: Sequence[tuple[int, int]], values: Sequence[float]) -> tuple[float, ...]:
    """The inverse of `row_logprobs` for `[start, stop)` ranges in a row of `sample_ids` ids."""
    if len(values) != sample_ids:
        raise ValueError(f"{sample_ids} ids but {len(values)} log-probs")
    return tuple(value for start, stop in spans for value in values[start:stop])
