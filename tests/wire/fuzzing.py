"""What the fuzz tests of all dialects share: bodies of any kind, and what may come of one.

A body is a whole answer's worth or it is a 4xx in the dialect's own shape: nothing else. Each dialect gives the
shape of its bodies and a reader of its answers (`fuzz_*.py`); `test_fuzz.py` runs them all.
"""

from __future__ import annotations

import copy
import json
import random
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

BATCH = 10
"""Bodies from one draw."""
QUICK = settings(max_examples=2_000 // BATCH, deadline=None, suppress_health_check=list(HealthCheck))
"""The run of every day: 2,000 bodies. A busy machine is no failure."""
PARTS, PART = 20, 5_000 // BATCH
"""The long run, in parts that each have their own seed: 100,000 bodies."""

texts = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=3)
words = st.sampled_from(["", "a", "h1", "é\n", "\U0001f600", "<|im_end|>", "\ud800", "x" * 1001])
"""Short texts with something odd about them; half of a surrogate pair is sent as an escape."""
_ODD = (None, True, False, 0, 1, -1, 1.5, 10**30, "", "auto", "text", "none", [], {}, [[]], [None], {"type": "text"})
anything = st.one_of(st.sampled_from(_ODD), values)


@dataclass(frozen=True)
class Target:
    """One dialect as it is fuzzed."""

    dialect: Dialect
    whole: st.SearchStrategy[dict[str, Any]]
    """Bodies as they should be, mostly."""
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


def batches(whole: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[bytes]]:
    """A body as it should be, and `BATCH - 1` bodies that were made of it.

    Drawing a body costs far more than reading it; the changes come from one drawn number, so failures still shrink.
    """

    @st.composite
    def batch(draw: st.DrawFn) -> list[bytes]:
        body, strange = draw(whole), draw(anything)
        chance = random.Random(draw(st.integers(0, 2**32 - 1)))
        return [sent(body), *(_variant(body, strange, chance) for _ in range(BATCH - 1))]

    return batch()


def sent(body: Any) -> bytes:
    """A body as clients send it: half of a surrogate pair becomes an escape."""
    return json.dumps(body).encode()


def _variant(body: dict[str, Any], strange: Any, chance: random.Random) -> bytes:
    """The body with a few places changed; now and then bytes gone wrong, or other JSON."""
    roll = chance.random()
    if roll < 0.05:
        return sent(strange)
    if roll < 0.15:
        return _garbled(sent(body), chance)
    body = json.loads(sent(body))
    for _ in range(chance.choice((1, 1, 1, 1, 2))):
        found = places(body)
        if not found:
            break
        _change(*chance.choice(found), found, strange, chance)
    return sent(body)


def _change(container: Any, key: Any, found: list[tuple[Any, Any]], strange: Any, chance: random.Random) -> None:
    """Take one place away, put something else there (of this body or not), repeat it, or add a field beside it."""
    kind = chance.randrange(5)
    if kind == 0:
        del container[key]
        return
    other, where = chance.choice(found)
    value = copy.deepcopy((strange, chance.choice(_ODD), other[where])[chance.randrange(3)])
    if kind == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 1:
        container[
            chance.choice(("type", "name", "content", "id", "shiny", where if isinstance(where, str) else ""))
        ] = value
    else:
        container[key] = value


def _garbled(body: bytes, chance: random.Random) -> bytes:
    """A body that lost its end, a piece, or has some bytes too many."""
    start, stop = sorted((chance.randrange(len(body) + 1), chance.randrange(len(body) + 1)))
    added = chance.choice((b"", b"\x00", b"\xff", b"NaN", b"-", b"1e999", b'"\\ud800"', b"[" * 200, b'{"a":' * 5000))
    return body[:start] + added + (b"" if chance.random() < 0.3 else body[chance.choice((start, stop)) :])
