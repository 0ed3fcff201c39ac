"""A stage's summary by hand, and its JSON shape."""

from __future__ import annotations

import msgspec
import pytest

from openforgerl.errors import InputError
from openforgerl.evals import TaskResult, compare_stages, summarise, summarise_by
from openforgerl.evals.summary import task_values


def result(task: str, passed: str, family: str = "copy", **failures: int) -> TaskResult:
    """`passed`: one character per attempt, `+` or `-`."""
    return TaskResult(
        task=task, passed=tuple(mark == "+" for mark in passed), labels={"family": family}, failures=failures
    )


STAGE = [
    result("a", "+++"),
    result("b", "+--", infrastructure=2),
    result("c", "---", family="find", harness=1, infrastructure=1),
    result("d", "++", family="find"),
]


def test_by_hand() -> None:
    made = summarise(STAGE, resamples=500)
    assert made.pass_at_1 is not None
    assert made.pass_at_3 is not None
    assert made.pass_hat_3 is not None
    assert made.pass_at_1.value == pytest.approx((1 + 1 / 3 + 0 + 1) / 4)
    # d has two attempts: not in the metrics of three
    assert made.pass_at_3.value == pytest.approx((1 + 1 + 0) / 3)
    assert made.pass_hat_3.value == pytest.approx((1 + 0 + 0) / 3)
    assert made.tasks_short == {"pass_at_1": 0, "pass_at_3": 1, "pass_hat_3": 1}
    assert (made.tasks, made.attempts, made.passed) == (4, 11, 6)
    assert made.failures == {"harness": 1, "infrastructure": 3}
    assert made.pass_at_1.low < made.pass_at_1.value < made.pass_at_1.high


def test_json_has_the_reports_shape() -> None:
    made = msgspec.json.decode(msgspec.json.encode(summarise(STAGE, resamples=50)))
    for metric in ("pass_at_1", "pass_at_3", "pass_hat_3"):
        assert made[metric].keys() == {"value", "low", "high"}


def test_order_of_tasks_is_no_input() -> None:
    assert summarise(STAGE, resamples=200) == summarise(STAGE[::-1], resamples=200)


def test_too_few_attempts_everywhere() -> None:
    made = summarise([result("a", "+-"), result("b", "")], resamples=50)
    assert made.pass_at_1 is not None
    assert made.pass_at_1.value == 0.5
    assert made.pass_at_3 is None
    assert made.tasks_short == {"pass_at_1": 1, "pass_at_3": 2, "pass_hat_3": 2}


def test_by_label() -> None:
    parts = summarise_by(STAGE, "family", resamples=50)
    assert list(parts) == ["copy", "find"]
    assert (parts["copy"].tasks, parts["copy"].passed) == (2, 4)
    assert (parts["find"].tasks, parts["find"].passed) == (2, 2)
    assert list(summarise_by(STAGE, "absent", resamples=50)) == [""]


def test_difference_by_hand() -> None:
    later = [result("a", "+++"), result("b", "+++"), result("c", "--+"), result("d", "+++")]
    made = compare_stages(STAGE, later, resamples=500)
    assert made.pass_at_1 is not None
    assert made.pass_at_3 is not None
    assert made.pass_at_1.value == pytest.approx((0 + 2 / 3 + 1 / 3 + 0) / 4)
    assert made.pass_at_3.value == pytest.approx((0 + 0 + 1) / 3)  # d is short before
    assert compare_stages(later, STAGE, resamples=500).pass_at_1.value == pytest.approx(-1 / 4)  # pyright: ignore


def test_what_cannot_be_summarised() -> None:
    with pytest.raises(InputError, match="no task"):
        summarise([])
    with pytest.raises(InputError, match="task a is there twice"):
        summarise([result("a", "+"), result("a", "-")])
    with pytest.raises(InputError, match="only one has d"):
        compare_stages(STAGE, STAGE[:3])
    with pytest.raises(InputError, match="unknown metric 'pass_at_2'"):
        task_values(STAGE, "pass_at_2")
