"""pass@k and pass^k by enumeration; intervals by enumeration of all resamples."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import InputError
from openforgerl.evals import (
    bootstrap_mean,
    paired_difference,
    paired_difference_over_runs,
    pass_at_k,
    pass_hat_k,
    pass_hat_k_power,
)
from openforgerl.evals.metrics import quantile


@given(st.integers(1, 7), st.data())
@settings(max_examples=100, deadline=None)
def test_both_are_shares_of_subsets(attempts: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    outcomes = [True] * passed + [False] * (attempts - passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(statistics.fmean(any(subset) for subset in subsets))
    assert pass_hat_k(attempts, passed, k) == pytest.approx(statistics.fmean(all(subset) for subset in subsets))


@pytest.mark.parametrize(("chance", "k"), [(0.3, 2), (0.5, 3)])
def test_both_are_unbiased_and_the_power_is_not(chance: float, k: int) -> None:
    """Mean over all outcomes of five attempts, weighted by their probability."""
    attempts = 5
    expected = {"at": 0.0, "hat": 0.0, "power": 0.0}
    for outcomes in itertools.product([True, False], repeat=attempts):
        passed = sum(outcomes)
        probability = chance**passed * (1 - chance) ** (attempts - passed)
        expected["at"] += probability * pass_at_k(attempts, passed, k)
        expected["hat"] += probability * pass_hat_k(attempts, passed, k)
        expected["power"] += probability * pass_hat_k_power(attempts, passed, k)
    assert expected["at"] == pytest.approx(1 - (1 - chance) ** k)
    assert expected["hat"] == pytest.approx(chance**k)
    assert expected["power"] > chance**k + 0.01


def test_values_by_hand() -> None:
    assert pass_at_k(3, 1, 1) == pytest.approx(1 / 3)
    assert pass_at_k(3, 1, 3) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)  # 3 of 6 pairs hold the pass
    assert pass_hat_k(4, 3, 2) == pytest.approx(1 / 2)  # 3 of 6 pairs hold passes only
    assert pass_hat_k(3, 2, 3) == 0.0
    assert pass_hat_k_power(3, 2, 3) == pytest.approx(8 / 27)
    assert pass_hat_k_power(1, 1, 3) == 1.0


@pytest.mark.parametrize(("attempts", "passed", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_senseless_counts_are_refused(attempts: int, passed: int, k: int) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(InputError, match=f"passed {passed}, attempts {attempts}, k {k}"):
            estimator(attempts, passed, k)


def test_quantile_by_hand() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([1.0, 2.0, 4.0], 0.0) == 1.0
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0
    assert quantile([5.0], 0.3) == 5.0


def test_interval_is_that_of_all_resamples() -> None:
    """Four tasks: all 256 resamples can be listed; the drawn interval is within a grid step of theirs."""
    values = [0.0, 0.25, 0.5, 1.0]
    means = sorted(statistics.fmean(draw) for draw in itertools.product(values, repeat=4))
    interval = bootstrap_mean(values, resamples=20_000)
    assert interval.value == pytest.approx(1.75 / 4)
    assert interval.low == pytest.approx(quantile(means, 0.025), abs=0.07)
    assert interval.high == pytest.approx(quantile(means, 0.975), abs=0.07)
    assert interval == bootstrap_mean(values, resamples=20_000)
    assert interval != bootstrap_mean(values, resamples=50, seed=1)


def test_equal_values_have_no_spread() -> None:
    interval = bootstrap_mean([0.5] * 7, resamples=100)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.5, 0.5)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """400 samples of 40 tasks whose true mean is 0.5: 95 % intervals miss it in about 20 (here 5 to 45)."""
    rng = random.Random(0)
    missed = 0
    for number in range(400):
        interval = bootstrap_mean([float(rng.random() < 0.5) for _ in range(40)], resamples=200, seed=number)
        missed += not interval.low <= 0.5 <= interval.high
    assert 5 <= missed <= 45


def test_pairing_takes_task_difficulty_out() -> None:
    """Every task gains 0.1 or 0.2, whatever its level: the paired interval is narrow, the unpaired one is not."""
    rng = random.Random(1)
    before = {f"t{n}": rng.random() * 0.8 for n in range(40)}
    after = {name: value + (0.1 if number % 2 else 0.2) for number, (name, value) in enumerate(before.items())}
    paired = paired_difference(before, after, resamples=2000)
    assert paired.value == pytest.approx(0.15)
    assert 0.1 <= paired.low < 0.15 < paired.high <= 0.2
    assert paired.high - paired.low < 0.05
    alone = bootstrap_mean(list(after.values()), resamples=2000)
    assert alone.high - alone.low > 0.1
    shuffled_order = dict(reversed(after.items()))
    assert paired_difference(before, shuffled_order, resamples=2000) == paired


def test_a_difference_needs_the_same_tasks() -> None:
    with pytest.raises(InputError, match="only one has b"):
        paired_difference({"a": 1.0}, {"a": 1.0, "b": 0.0})
    with pytest.raises(InputError, match="no task"):
        paired_difference({}, {})
    with pytest.raises(InputError, match="finite"):
        bootstrap_mean([0.5, float("nan")])


def test_over_runs_the_seeds_spread_too() -> None:
    """Three runs that gain 0, 0.2 and 0.4 on every task: tasks add nothing, runs all of the spread."""
    before = {f"t{n}": 0.3 for n in range(10)}
    runs = [(before, dict.fromkeys(before, 0.3 + gain)) for gain in (0.0, 0.2, 0.4)]
    interval = paired_difference_over_runs(runs, resamples=4000)
    assert interval.value == pytest.approx(0.2)
    # of 27 draws of runs one has only 0 (3.7 % > 2.5 %) and one only 0.4
    assert interval.low == pytest.approx(0.0)
    assert interval.high == pytest.approx(0.4)
    one = paired_difference_over_runs(runs[1:2], resamples=100)
    assert one.low == pytest.approx(0.2)
    with pytest.raises(InputError, match="run 1 was measured on other tasks"):
        paired_difference_over_runs([runs[0], ({"x": 0.0}, {"x": 0.0})])
    with pytest.raises(InputError, match="at least one run"):
        paired_difference_over_runs([])
