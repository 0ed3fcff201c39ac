"""What a verifier wrote, read strictly: one finite number in the declared range, or a named reason why not.

Nothing here ever becomes 0.0 by itself: a reward that cannot be read is a failure of the verifier.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import msgspec

from openforgerl.errors import StageError
from openforgerl.types import Origin, Stage

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE = {"nan", "inf", "infinity"}


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward and the further numbers beside it."""

    value: float
    metrics: dict[str, float] = {}


def parse_text(data: bytes, bounds: tuple[float, float]) -> Reward:
    """`reward.txt`: one decimal number, white space around it allowed. Raises `StageError` (VERIFY)."""
    text = _decode(data, "reward.txt").strip()
    if not text:
        raise invalid("empty", "reward.txt is empty")
    if text.lstrip("+-").lower() in _NOT_FINITE:
        raise invalid("not_finite", f"reward.txt holds {text[:80]!r}; a finite number is needed")
    if not _NUMBER.fullmatch(text):
        raise invalid("not_a_number", f"reward.txt holds {text[:80]!r}; one decimal number is needed")
    return Reward(value=_in_range(float(text), "reward.txt", bounds))


def parse_json(data: bytes, bounds: tuple[float, float]) -> Reward:
    """`reward.json`: one number, or a flat object of numbers. Raises `StageError` (VERIFY).

    The reward of an object is its `reward`, or its only number; the others become metrics.
    """
    text = _decode(data, "reward.json")
    if not text.strip():
        raise invalid("empty", "reward.json is empty")
    try:
        value: Any = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise invalid("not_json", f"reward.json is not JSON: {error}") from error
    if not isinstance(value, dict):
        return Reward(value=_in_range(_number(value, "reward.json"), "reward.json", bounds))
    numbers = {name: _number(item, f"reward.json: {name!r}") for name, item in value.items()}
    if "reward" in numbers:
        key = "reward"
    elif len(numbers) == 1:
        key = next(iter(numbers))
    else:
        raise invalid("ambiguous", f"reward.json has no 'reward' but {sorted(numbers)[:20]}; name the reward 'reward'")
    reward = _in_range(numbers.pop(key), f"reward.json: {key!r}", bounds)
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise invalid("not_finite", f"reward.json: {name!r} is {number!r}; finite numbers are needed")
    return Reward(value=reward, metrics=numbers)


def invalid(reason: str, message: str, **evidence: object) -> StageError:
    """The one way in which an unreadable reward is reported: `kind` is `reward_<reason>`, never retried."""
    return StageError(
        Stage.VERIFY,
        f"reward_{reason}",
        message,
        origin=Origin.VERIFIER,
        retryable=False,
        evidence=dict(evidence),
    )


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid("encoding", f"{name} is not UTF-8 (byte {error.start})") from error
    if text.startswith("\ufeff"):
        raise invalid("encoding", f"{name} begins with a byte order mark; write plain UTF-8")
    return text


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        reason = "not_flat" if isinstance(value, list | dict) else "not_a_number"
        raise invalid(reason, f"{where} is {json.dumps(value)[:80]}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _in_range(value: float, where: str, bounds: tuple[float, float]) -> float:
    if not math.isfinite(value):
        raise invalid("not_finite", f"{where} is {value!r}; a finite number is needed")
    low, high = bounds
    if not low <= value <= high:
        raise invalid("out_of_range", f"{where} is {value!r}, outside the declared range [{low:g}, {high:g}]")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _constant(name: str) -> NoReturn:
    raise invalid("not_finite", f"reward.json holds {name}; finite numbers are needed")
