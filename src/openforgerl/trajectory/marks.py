"""A sample as consecutive marked pieces: what `show` colours."""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.types import Sample


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Ids `[start, stop)` of a sample and what becomes of them."""

    start: int
    stop: int
    ids: tuple[int, ...]
    state: Literal["context", "trained", "masked"]
    reason: str | None = None
    call_id: str | None = None


def annotate(sample: Sample) -> list[Mark]:
    """The whole row in order: every id lies in exactly one mark, and no mark is empty."""
    marks: list[Mark] = []
    at = 0
    for span in sample.spans:
        if span.start > at:
            marks.append(Mark(start=at, stop=span.start, ids=sample.ids[at : span.start], state="context"))
        marks.append(
            Mark(
                start=span.start,
                stop=span.stop,
                ids=sample.ids[span.start : span.stop],
                state=span.state,
                reason=span.reason,
                call_id=span.call_id,
            )
        )
        at = span.stop
    if at < len(sample.ids):
        marks.append(Mark(start=at, stop=len(sample.ids), ids=sample.ids[at:], state="context"))
    return marks
