"""Reward files: a finite number in the declared range is a reward, everything else a named failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openforgerl.errors import StageError
from openforgerl.types import Origin, Stage
from openforgerl.verifiers.reward import Reward, parse_json, parse_text

UNIT = (0.0, 1.0)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"1", 1.0),
        (b"0\n", 0.0),
        (b"  0.5\n", 0.5),
        (b"+1.", 1.0),
        (b".25", 0.25),
        (b"1e-2\r\n", 0.01),
        (b"-0", 0.0),
    ],
)
def test_text_that_is_a_reward(data: bytes, value: float) -> None:
    assert parse_text(data, UNIT) == Reward(value=value)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "reward_empty"),
        (b" \n\t", "reward_empty"),
        (b"nan", "reward_not_finite"),
        (b"-Inf", "reward_not_finite"),
        (b"Infinity", "reward_not_finite"),
        (b"1e309", "reward_not_finite"),
        (b"1,0", "reward_not_a_number"),
        (b"true", "reward_not_a_number"),
        (b"1 1", "reward_not_a_number"),
        (b"1\n0\n", "reward_not_a_number"),
        (b"0x1", "reward_not_a_number"),
        (b"1_0", "reward_not_a_number"),
        ("١".encode(), "reward_not_a_number"),  # a digit to str.isdigit() and float()
        (b"\x00", "reward_not_a_number"),
        (b"\xef\xbb\xbf1", "reward_encoding"),
        (b"\xff\xfe1\x00", "reward_encoding"),
        (b"1e12", "reward_out_of_range"),
        (b"-1", "reward_out_of_range"),
        (b"1.0000001", "reward_out_of_range"),
    ],
)
def test_text_that_is_none(data: bytes, kind: str) -> None:
    assert_invalid(parse_text, data, kind)


@pytest.mark.parametrize(
    ("data", "reward"),
    [
        (b"1", Reward(value=1.0)),
        (b" 0.5 ", Reward(value=0.5)),
        (b'{"reward": 1}', Reward(value=1.0)),
        (b'{"accuracy": 0.25}', Reward(value=0.25)),
        (b'{"steps": 12, "reward": 0.5}', Reward(value=0.5, metrics={"steps": 12.0})),
    ],
)
def test_json_that_is_a_reward(data: bytes, reward: Reward) -> None:
    assert parse_json(data, UNIT) == reward


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "reward_empty"),
        (b"{", "reward_not_json"),
        (b"1 2", "reward_not_json"),
        (b"[" * 100_000, "reward_not_json"),
        (b'{"reward": 0, "reward": 1}', "reward_not_json"),
        (b'{"reward": null}', "reward_not_a_number"),
        (b'{"reward": "1"}', "reward_not_a_number"),
        (b'{"reward": true}', "reward_not_a_number"),
        (b"null", "reward_not_a_number"),
        (b'"1"', "reward_not_a_number"),
        (b"true", "reward_not_a_number"),
        (b"[1]", "reward_not_flat"),
        (b'{"reward": {"value": 1}}', "reward_not_flat"),
        (b'{"reward": 1.0, "resolved": true, "regressions": [], "parse_status": "ok"}', "reward_not_a_number"),
        (b'{"a": 1, "b": 0}', "reward_ambiguous"),
        (b"{}", "reward_ambiguous"),
        (b"NaN", "reward_not_finite"),
        (b'{"reward": Infinity}', "reward_not_finite"),
        (b'{"reward": 1e309}', "reward_not_finite"),
        (b'{"reward": 1, "x": NaN}', "reward_not_finite"),
        (b'{"reward": 1, "x": 1e309}', "reward_not_finite"),
        (b'{"reward": ' + b"9" * 400 + b"}", "reward_not_finite"),
        (b'{"reward": ' + b"9" * 5000 + b"}", "reward_not_json"),  # Python refuses to read so long an integer
        (b'{"reward": 2}', "reward_out_of_range"),
        (b"\xef\xbb\xbf1", "reward_encoding"),
        (b"\xff", "reward_encoding"),
    ],
)
def test_json_that_is_none(data: bytes, kind: str) -> None:
    assert_invalid(parse_json, data, kind)


def test_the_range_is_the_tasks_own() -> None:
    assert parse_text(b"-1", (-1.0, 1.0)).value == -1.0
    assert parse_json(b"2", (0.0, 5.0)).value == 2.0


def assert_invalid(parse: Callable[[bytes, tuple[float, float]], Reward], data: bytes, kind: str) -> None:
    with pytest.raises(StageError) as raised:
        parse(data, UNIT)
    error = raised.value
    assert (error.stage, error.kind, error.origin) == (Stage.VERIFY, kind, Origin.VERIFIER)
    assert error.retryable is False
    assert error.message.startswith("reward.")
