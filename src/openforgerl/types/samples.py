"""What a trainer consumes, and the tree it is taken from."""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from openforgerl.types.calls import ModelCall, PlacedImage


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A root-to-leaf path: each call's prompt begins with its predecessor's prompt and sampled ids."""

    branch_id: str
    thread: str
    calls: tuple[str, ...]
    """call_ids from root to leaf."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one attempt, in order of arrival, and the branches they form."""

    attempt_id: str
    calls: tuple[ModelCall, ...]
    branches: tuple[Branch, ...]

    def call(self, call_id: str) -> ModelCall:
        """The call of that id; KeyError when the trajectory has none."""
        for call in self.calls:
            if call.call_id == call_id:
                return call
        raise KeyError(call_id)


class Source(enum.StrEnum):
    """Who produced the tokens. RL takes `policy` only."""

    POLICY = "policy"
    TEACHER = "teacher"
    IMPORT = "import"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """`ids[start:stop] == call.sampled_ids[offset : offset + stop - start]`."""

    start: int
    stop: int
    call_id: str
    offset: int
    state: Literal["trained", "masked"]
    reason: str | None = None
    """Why masked; None exactly when trained."""
    weights_version: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) is empty or negative")
        if self.offset < 0:
            raise ValueError(f"span offset {self.offset} is negative")
        if (self.state == "trained") != (self.reason is None):
            raise ValueError("a masked span has a reason, a trained one has none")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training row. Everything outside `spans` is context. Dense masks exist only at the trainer's door."""

    sample_id: str
    attempt_id: str
    rollout_id: str
    group_id: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    logprobs: tuple[float, ...] | None
    """One finite float per span token, concatenated in span order; None when not known (teacher, import)."""
    source: Source
    advantage: float | None = None
    weight: float = 1.0
    images: tuple[PlacedImage, ...] = ()
    template_digest: str = ""

    def __post_init__(self) -> None:
        at = 0
        for span in self.spans:
            if span.start < at or span.stop > len(self.ids):
                raise ValueError(f"sample {self.sample_id}: spans overlap, are unordered or leave the row")
            at = span.stop
        if self.logprobs is not None:
            if len(self.logprobs) != self.span_tokens:
                raise ValueError(
                    f"sample {self.sample_id}: {self.span_tokens} span tokens, {len(self.logprobs)} log-probs"
                )
            if not all(map(math.isfinite, self.logprobs)):
                raise ValueError(f"sample {self.sample_id}: log-probs must be finite")
        for name in ("advantage", "weight"):
            value: float | None = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"sample {self.sample_id}: {name} must be finite")

    @property
    def span_tokens(self) -> int:
        """How many ids lie in spans, trained or masked."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def trained_tokens(self) -> int:
        """How many ids the loss sees."""
        return sum(span.stop - span.start for span in self.spans if span.state == "trained")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The conservation account: sampled == trained + masked + dropped (asserted where it is made)."""

    sampled: int
    trained: int
    masked: dict[str, int] = {}
    """reason → tokens that are in a sample but not trained."""
    dropped: dict[str, int] = {}
    """reason → tokens that are in no sample."""

    def __post_init__(self) -> None:
        accounted = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        if accounted != self.sampled:
            raise ValueError(f"{self.sampled} tokens sampled but {accounted} accounted for")


class SampleSet(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one attempt with their account."""

    samples: tuple[Sample, ...]
    totals: Totals
