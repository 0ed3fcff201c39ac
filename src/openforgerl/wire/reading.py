"""Reading a JSON body strictly: every complaint names the field and what is accepted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from openforgerl.conversation import MOST_NESTED, nested_too_deeply
from openforgerl.errors import WireError
from openforgerl.types import JsonValue
from openforgerl.wire.rereading import Rereading

_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 10**18
"""Numbers below it are shown in complaints."""
_MENDED = "the body holds half of a surrogate pair (a character cut in two); it was replaced by U+FFFD"


def bad(path: str, message: str) -> WireError:
    """A 400 about one field; `path` is written as in `messages[2].content`."""
    return WireError(400, "invalid_request", f"{path}: {message}", param=path)


def decode_object(body: bytes, rereading: Rereading | None = None) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
    """The JSON object in `body`, and warnings about what had to be mended. `rereading`: the session's, if it has one.

    A harness that cuts tool output by UTF-16 units sends half of a surrogate pair as an escape. Refusing it
    would kill the attempt, so the half is replaced by U+FFFD and reported.
    """
    warnings: tuple[str, ...] = ()
    items: dict[bytes, JsonValue] = {}
    try:
        value, new, items = (rereading or Rereading()).decode(body)
    except (ValueError, RecursionError):
        # Whatever is wrong with it, what reads the whole says it best.
        value, warnings = _whole(body)
        new = value
    if not isinstance(value, dict):
        raise WireError(400, "invalid_request", f"the body must be a JSON object, not {type_name(value)}")
    if nested_too_deeply(new):
        raise WireError(400, "invalid_request", f"the body is nested too deeply; {MOST_NESTED} levels are taken")
    if rereading is not None:
        rereading.keep(items)
    return value, warnings


def _whole(body: bytes) -> tuple[JsonValue, tuple[str, ...]]:
    try:
        return msgspec.json.decode(body), ()
    except RecursionError as error:
        raise WireError(400, "invalid_request", "the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        return _mended(body, error), (_MENDED,)


def _mended(body: bytes, reason: msgspec.DecodeError) -> JsonValue:
    """`body` with lone surrogates replaced; WireError when that is not what is wrong with it."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        if not _has_surrogate(value):
            raise ValueError("no lone surrogate to mend")
        return _without_surrogates(value)
    except (ValueError, RecursionError) as error:
        raise WireError(400, "invalid_request", f"the body is not valid JSON: {reason}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _has_surrogate(value: JsonValue) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, list):
        return any(map(_has_surrogate, value))
    if isinstance(value, dict):
        return any(_has_surrogate(key) or _has_surrogate(item) for key, item in value.items())
    return False


def _without_surrogates(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("number out of range")
    return value


def type_name(value: JsonValue) -> str:
    """How JSON calls the type of a value."""
    if value is None:
        return "null"
    names = ((bool, "a boolean"), (str, "a string"), (int | float, "a number"), (list, "a list"), (dict, "an object"))
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)


def text(value: JsonValue, path: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise bad(path, f"must be a string, not {type_name(value)}")
    return value


def flag(value: JsonValue, path: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise bad(path, f"must be true or false, not {type_name(value)}")
    return value


def mapping(value: JsonValue, path: str) -> dict[str, JsonValue]:
    """An object."""
    if not isinstance(value, dict):
        raise bad(path, f"must be an object, not {type_name(value)}")
    return value


def items(value: JsonValue, path: str) -> list[JsonValue]:
    """A list."""
    if not isinstance(value, list):
        raise bad(path, f"must be a list, not {type_name(value)}")
    return value


def number(value: JsonValue, path: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(path, f"must be a number, not {type_name(value)}")
    if not low <= value <= high:
        # An integer may be larger than any double, and then has no short form.
        got = f"; got {value:g}" if abs(value) < _SHOWN else ""
        raise bad(path, f"must be a number from {low:g} to {high:g}{got}")
    return value


def count(value: JsonValue, path: str, *, low: int = 1) -> int:
    """An integer of at least `low`; `8.0` is one."""
    whole = not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )
    if not whole:
        raise bad(
            path,
            f"must be an integer, not {value!r}"
            if isinstance(value, float)
            else f"must be an integer, not {type_name(value)}",
        )
    if value < low:
        got = f"; got {value!r}" if abs(value) < _SHOWN else ""
        raise bad(path, f"must be {low} or more{got}")
    return int(value)


SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 1e9),
    "min_p": (0, 1),
    "presence_penalty": (-1e3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
    "repetition_penalty": (0, 1e3),
    "seed": (-(2.0**64), 2.0**64),
}
"""OpenAI's sampling fields, which are recorded as asked: name → accepted range."""


def numbers(
    body: Mapping[str, JsonValue], ranges: Mapping[str, tuple[float, float]], *, under: str = ""
) -> dict[str, JsonValue]:
    """Those of `ranges` that are there, each within its range; `under` stands before the name in complaints."""
    return {
        name: number(body[name], f"{under}{name}", low=low, high=high)
        for name, (low, high) in ranges.items()
        if present(body, name)
    }


MOST_STOPS = 64
LONGEST_STOP = 1000
"""Characters of one stop string. Every piece of text is searched for every stop string, while other calls wait."""


def stop_strings(value: JsonValue, path: str) -> tuple[str, ...]:
    """A list of stop strings, or null."""
    given = items([] if value is None else value, path)
    if len(given) > MOST_STOPS:
        raise bad(path, f"may hold {MOST_STOPS} stop strings; got {len(given)}")
    stops = tuple(text(item, f"{path}[{at}]") for at, item in enumerate(given))
    for at, stop in enumerate(stops):
        if not 0 < len(stop) <= LONGEST_STOP:
            raise bad(f"{path}[{at}]", f"must have 1 to {LONGEST_STOP} characters; it has {len(stop)}")
    return stops


def present(body: Mapping[str, Any], name: str) -> bool:
    """Whether a field is there: null is the same as absent."""
    return body.get(name) is not None
