"""Recorded log-probs against the log-probs of the weights that sampled: does the record say what the model did?

A difference of rounding size says that ids, context, temperature and weights version are all as recorded. Anything
larger has a cause worth finding: another kernel or number format in the engine, or a lie in the record.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from openforgerl.training.learner import Learner
from openforgerl.training.options import LearnerOptions
from openforgerl.types import Sample, Span


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """|recorded - rescored| over the tokens that one weights version sampled, in nats."""

    weights_version: int
    weights: str
    """Directory that the weights came from."""
    tokens: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    worst: str
    """Sample that holds the largest difference."""


class Rescored(msgspec.Struct, frozen=True, kw_only=True):
    """What could be compared, and what could not."""

    versions: tuple[Difference, ...]
    unscored: dict[str, int]
    """Why tokens were not compared → how many."""


def rescore(samples: Sequence[Sample], *, temperatures: Mapping[str, float], weights: Mapping[int, Path]) -> Rescored:
    """Score the span tokens of `samples`, masked ones too, with the weights that sampled them.

    `temperatures`: call id → temperature that its log-probs are given at. `weights`: version → model directory.
    Raises InputError when a directory holds no model.
    """
    unscored: Counter[str] = Counter()
    wanted: dict[int, dict[float, list[Sample]]] = {}
    for sample in samples:
        if sample.logprobs is None or sample.images:
            unscored["no log-probs" if sample.logprobs is None else "images"] += sample.span_tokens
            continue
        for (version, temperature), part in _parts(sample, temperatures).items():
            if version in weights:
                wanted.setdefault(version, {}).setdefault(temperature, []).append(part)
            else:
                unscored["the weights of their version are not kept"] += part.span_tokens
    versions = [_difference(version, weights[version], groups) for version, groups in sorted(wanted.items())]
    return Rescored(versions=tuple(versions), unscored=dict(sorted(unscored.items())))


def _parts(sample: Sample, temperatures: Mapping[str, float]) -> dict[tuple[int, float], Sample]:
    """The sample once for each (version, temperature), with only the spans of these, all to be scored."""
    assert sample.logprobs is not None
    spans: dict[tuple[int, float], list[Span]] = {}
    values: dict[tuple[int, float], list[float]] = {}
    at = 0
    for span in sample.spans:
        length = span.stop - span.start
        if span.start:  # nothing precedes a row's first id, so nothing predicts it
            key = span.weights_version, temperatures[span.call_id]
            spans.setdefault(key, []).append(msgspec.structs.replace(span, state="trained", reason=None))
            values.setdefault(key, []).extend(sample.logprobs[at : at + length])
        at += length
    return {
        key: msgspec.structs.replace(sample, spans=tuple(chosen), logprobs=tuple(values[key]))
        for key, chosen in spans.items()
    }


def _difference(version: int, path: Path, groups: Mapping[float, Sequence[Sample]]) -> Difference:
    differences: list[tuple[float, str]] = []
    for temperature, parts in groups.items():
        scores = Learner(path, LearnerOptions(temperature=temperature)).logprobs(parts)
        for part in parts:
            pairs = zip(part.logprobs or (), scores[part.sample_id], strict=True)
            differences += [(abs(recorded - scored), part.sample_id) for recorded, scored in pairs]
    differences.sort()
    values = [value for value, _ in differences]
    return Difference(
        weights_version=version,
        weights=str(path),
        tokens=len(values),
        mean=sum(values) / len(values),
        p50=_quantile(values, 0.5),
        p90=_quantile(values, 0.9),
        p99=_quantile(values, 0.99),
        max=values[-1],
        worst=differences[-1][1],
    )


def _quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]
