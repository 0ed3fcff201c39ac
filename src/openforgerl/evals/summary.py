"""One stage's evaluation as the `stages.*` of `report.json`, and the difference of two stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from openforgerl.errors import InputError
from openforgerl.evals.metrics import Interval, bootstrap_mean, paired_difference, pass_at_k, pass_hat_k

METRICS: tuple[tuple[str, Callable[[int, int, int], float], int], ...] = (
    ("pass_at_1", pass_at_k, 1),
    ("pass_at_3", pass_at_k, 3),
    ("pass_hat_3", pass_hat_k, 3),
)
"""Name in the report, estimator, k."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """All graded attempts at one task."""

    task: str
    passed: tuple[bool, ...]
    """One verdict per rollout. Failures of ours have none: they were refilled or are missing here."""
    failures: dict[str, int] = {}
    """Origin → attempts that ended in a Failure, refilled ones included."""
    labels: dict[str, str] = {}
    """What results can be split by: family, split, phrasing."""


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A stage over all its tasks. A metric is None when no task has enough attempts for it."""

    pass_at_1: Interval | None
    pass_at_3: Interval | None
    pass_hat_3: Interval | None
    tasks: int
    attempts: int
    """Graded attempts."""
    passed: int
    tasks_short: dict[str, int]
    """Metric → tasks left out of it, because they have fewer than k graded attempts."""
    failures: dict[str, int]
    """Origin → attempts."""


class StageDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Later stage minus earlier, on the same tasks. None as in StageSummary."""

    pass_at_1: Interval | None
    pass_at_3: Interval | None
    pass_hat_3: Interval | None


def summarise(
    results: Sequence[TaskResult], *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> StageSummary:
    """Estimates and intervals over tasks. Raises InputError for no task, or one that is there twice."""
    _check_names(results)
    metrics: dict[str, Interval | None] = {}
    short: dict[str, int] = {}
    for name in (name for name, _, _ in METRICS):
        values = task_values(results, name)
        short[name] = len(results) - len(values)
        metrics[name] = (
            bootstrap_mean(
                [values[task] for task in sorted(values)], resamples=resamples, confidence=confidence, seed=seed
            )
            if values
            else None
        )
    failures: Counter[str] = Counter()
    for result in results:
        failures.update(result.failures)
    return StageSummary(
        pass_at_1=metrics["pass_at_1"],
        pass_at_3=metrics["pass_at_3"],
        pass_hat_3=metrics["pass_hat_3"],
        tasks=len(results),
        attempts=sum(len(result.passed) for result in results),
        passed=sum(sum(result.passed) for result in results),
        tasks_short=short,
        failures=dict(sorted(failures.items())),
    )


def summarise_by(
    results: Sequence[TaskResult], label: str, *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> dict[str, StageSummary]:
    """One summary per value of a label (a wholly held-out family is reported apart). Missing counts as ''."""
    parts: dict[str, list[TaskResult]] = {}
    for result in results:
        parts.setdefault(result.labels.get(label, ""), []).append(result)
    return {
        value: summarise(part, resamples=resamples, confidence=confidence, seed=seed)
        for value, part in sorted(parts.items())
    }


def compare_stages(
    before: Sequence[TaskResult],
    after: Sequence[TaskResult],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> StageDifference:
    """Paired differences `after` - `before`. Raises InputError when the tasks differ.

    Per metric, only tasks with enough attempts on both sides take part.
    """
    _check_names(before)
    _check_names(after)
    odd = sorted({result.task for result in before} ^ {result.task for result in after})
    if odd:
        raise InputError(f"stages must be measured on the same tasks; only one has {', '.join(odd[:5])}")
    metrics: dict[str, Interval | None] = {}
    for name in (name for name, _, _ in METRICS):
        left, right = task_values(before, name), task_values(after, name)
        both = left.keys() & right.keys()
        metrics[name] = (
            paired_difference(
                {task: left[task] for task in both},
                {task: right[task] for task in both},
                resamples=resamples,
                confidence=confidence,
                seed=seed,
            )
            if both
            else None
        )
    return StageDifference(
        pass_at_1=metrics["pass_at_1"], pass_at_3=metrics["pass_at_3"], pass_hat_3=metrics["pass_hat_3"]
    )


def task_values(results: Sequence[TaskResult], metric: str) -> dict[str, float]:
    """Task → its value of a metric of the report, for tasks with enough attempts. InputError for an unknown metric."""
    for name, estimator, k in METRICS:
        if name == metric:
            return {
                result.task: estimator(len(result.passed), sum(result.passed), k)
                for result in results
                if len(result.passed) >= k
            }
    raise InputError(f"unknown metric {metric!r}; known: {', '.join(name for name, _, _ in METRICS)}")


def _check_names(results: Sequence[TaskResult]) -> None:
    if not results:
        raise InputError("there is no task to summarise")
    repeated = [name for name, count in Counter(result.task for result in results).items() if count > 1]
    if repeated:
        raise InputError(f"task {repeated[0]} is there twice; give all its attempts in one result")
