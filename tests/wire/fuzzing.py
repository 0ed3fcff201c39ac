"""What the fuzz tests of all dialects share: bodies of any kind, and what may come of one.

A body is a whole answer's worth or it is a 4xx in the dialect's own shape: nothing else. Each dialect gives the
shape of its bodies and a reader of its answers (`fuzz_*.py`); `test_fuzz.py` runs them all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from openforgerl.conversation import digest_message, digest_outline, digest_tools
from openforgerl.errors import WireError
from openforgerl.wire import Address, Dialect, Memory, NoMemory, Request
from openforgerl.wire.dialect import BODY_ALONE

Bodies = st.SearchStrategy[bytes]

QUICK = settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
"""The run of every day. A busy machine is no failure."""
PARTS, PART = 20, 5_000
"""The long run, in parts that each have their own seed: 100,000."""

texts = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=3)
words = st.sampled_from(["", "a", "h1", "é\n", "\U0001f600", "<|im_end|>", "\ud800", "x" * 1001])
"""Short texts with something odd about them; half of a surrogate pair is sent as an escape."""
anything = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 1.5, 10**30, "", "auto", "text", "none", [], {}, [[]], [None], {"type": "text"}]
    ),
    values,
)


@dataclass(frozen=True)
class Target:
    """One dialect as it is fuzzed."""

    dialect: Dialect
    bodies: Bodies
    answered: Callable[[Request], None]
    """Gives an answer to the request, whole and as a stream, and reads both as a client does."""
    refused: Callable[[dict[str, Any], WireError], None]
    """Checks the shape of a refusal."""
    memory: Callable[[], Memory] = NoMemory
    address: Address = BODY_ALONE


def outcome(target: Target, body: bytes, *, strict: bool) -> Request | None:
    """The request, after an answer was given to it, or None when it was refused as it should be."""
    dialect = target.dialect
    try:
        request = dialect.parse(body, strict=strict, address=target.address, memory=target.memory())
    except WireError as error:
        assert 400 <= error.status < 500 and 400 <= dialect.status(error) < 500
        assert error.message and error.code
        target.refused(json.loads(msgspec.json.encode(dialect.error(error))), error)
        return None
    assert request.conversation.messages
    msgspec.json.encode(request)  # whatever is taken can be recorded
    for message in request.conversation.messages:
        assert digest_message(message) and digest_outline(message)
    digest_tools(request.conversation.tools)
    target.answered(request)
    return request


def of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with these fields."""
    return st.fixed_dictionaries(fields)


def kinds(*names: str) -> st.SearchStrategy[str]:
    """One of these words."""
    return st.sampled_from(names)


def mostly(
    good: st.SearchStrategy[Any], strange: st.SearchStrategy[Any] = anything, *, one_in: int = 10
) -> st.SearchStrategy[Any]:
    """`good`, but for one time in so many."""
    return st.integers(0, one_in - 1).flatmap(lambda number: good if number else strange)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@st.composite
def changed(draw: st.DrawFn, whole: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """A body as it should be, with up to two places gone or holding anything at all."""
    body = copy.deepcopy(draw(whole))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        found = places(body)
        if not found:
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(anything))  # the next change may reach into it
        else:
            del container[key]
    return body


@st.composite
def garbled(draw: st.DrawFn, bodies: Bodies) -> bytes:
    """A body that lost its end or has a few bytes too many."""
    body = draw(bodies)
    at = draw(st.integers(0, len(body)))
    return (
        body[:at]
        + draw(st.binary(max_size=3) | st.sampled_from([b"[" * 200, b"NaN", b'"\\ud800"']))
        + (body[at:] if draw(st.booleans()) else b"")
    )


def sent(bodies: st.SearchStrategy[Any]) -> Bodies:
    """These bodies as bytes, three times in four; else other JSON, a body gone wrong, or no JSON at all."""
    good = bodies.map(lambda body: json.dumps(body).encode())
    other = anything.map(lambda value: json.dumps(value).encode()) | garbled(good) | st.binary(max_size=40)
    return st.integers(0, 3).flatmap(lambda number: good if number else other)
