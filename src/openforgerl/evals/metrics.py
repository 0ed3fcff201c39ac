"""pass@k, pass^k and bootstrap intervals.

Everything is averaged over tasks, and tasks are what the bootstrap draws: attempts at one task are not independent
evidence about other tasks, so intervals over pooled attempts would be too narrow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from openforgerl.errors import InputError


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and a percentile bootstrap interval around it. A difference has all three as differences."""

    value: float
    low: float
    high: float


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Probability that at least one of `k` attempts at a task passes, from `attempts` ≥ k of which `passed` did.

    1 - C(n - c, k) / C(n, k): the share of all k-subsets of the attempts that hold a pass, which is unbiased
    (arXiv 2107.03374 §2.1). Raises InputError for counts that make no sense or k above the attempts.
    """
    _check(attempts, passed, k)
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """pass^k: probability that all of `k` attempts at a task pass (reliability; tau-bench, arXiv 2406.12045 §3).

    C(c, k) / C(n, k): the share of all k-subsets that hold passes only, which is unbiased. Raises InputError like
    `pass_at_k`.
    """
    _check(attempts, passed, k)
    return math.comb(passed, k) / math.comb(attempts, k)


def pass_hat_k_power(attempts: int, passed: int, k: int) -> float:
    """(c / n) ** k: the plug-in form of pass^k that some reports use. Biased upwards; needs one attempt only."""
    _check(attempts, passed, min(k, attempts))
    return (passed / attempts) ** k


def bootstrap_mean(
    values: Sequence[float], *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean of one value per task and its percentile interval over tasks drawn with replacement.

    Deterministic for a seed. Raises InputError for no value or one that is not finite.
    """
    _check_values(values)
    count = len(values)

    def draw(rng: random.Random) -> float:
        return math.fsum(rng.choices(values, k=count)) / count

    return _interval(math.fsum(values) / count, draw, resamples, confidence, seed)


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean over tasks of `after` - `before`, task by task, with a percentile interval over tasks.

    Both map task → value and must name the same tasks: pairing takes the tasks' own difficulty out of the
    interval. Raises InputError naming tasks that only one side has.
    """
    values = _differences(before, after)
    return bootstrap_mean(values, resamples=resamples, confidence=confidence, seed=seed)


def paired_difference_over_runs(
    runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean difference over several runs (training seeds) on the same tasks: each resample draws runs, and tasks.

    The interval covers both another choice of tasks and another training seed; with few runs the second part is
    rough. Raises InputError when a run names other tasks.
    """
    if not runs:
        raise InputError("a difference over runs needs at least one run")
    names = sorted(runs[0][0])
    table = [_differences(before, after) for before, after in runs]
    for number, (before, _) in enumerate(runs):
        if sorted(before) != names:
            raise InputError(f"run {number} was measured on other tasks than run 0; they cannot be paired")
    size, count = len(table), len(names)

    def draw(rng: random.Random) -> float:
        places = rng.choices(range(count), k=count)
        return math.fsum(row[place] for row in rng.choices(table, k=size) for place in places) / (size * count)

    value = math.fsum(difference for row in table for difference in row) / (size * count)
    return _interval(value, draw, resamples, confidence, seed)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted numbers lie, linear between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower)


def _interval(
    value: float, draw: Callable[[random.Random], float], resamples: int, confidence: float, seed: int
) -> Interval:
    if resamples < 1 or not 0 < confidence < 1:
        raise InputError(
            f"resamples must be 1 or more and confidence between 0 and 1; got {resamples} and {confidence}"
        )
    rng = random.Random(f"bootstrap:{seed}")
    means = sorted(draw(rng) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return Interval(value=value, low=quantile(means, tail), high=quantile(means, 1 - tail))


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """In the order of task names, so that the draw does not depend on the order of the mappings."""
    odd = sorted(before.keys() ^ after.keys())
    if odd:
        raise InputError(f"both sides must have the same tasks; only one has {', '.join(odd[:5])}")
    values = [after[name] - before[name] for name in sorted(before)]
    _check_values(values)
    return values


def _check_values(values: Sequence[float]) -> None:
    if not values:
        raise InputError("nothing to average: there is no task")
    if not all(map(math.isfinite, values)):
        raise InputError("values must be finite")


def _check(attempts: int, passed: int, k: int) -> None:
    if not (0 <= passed <= attempts and 1 <= k <= attempts):
        raise InputError(
            f"needs 0 ≤ passed ≤ attempts and 1 ≤ k ≤ attempts; got passed {passed}, attempts {attempts}, k {k}"
        )
