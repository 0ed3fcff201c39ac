"""Whatever a client sends, in any dialect, it gets an answer or a clear 4xx.

The long run (100,000 bodies a dialect) is under its own marker, with other bodies for every number that is given:
`pytest -m fuzz tests/wire/test_fuzz.py -k chat --hypothesis-seed=7`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.wire import DIALECTS, Memory, Request
from openforgerl.wire.rereading import LISTS, Rereading

from . import fuzz_chat, fuzz_gemini, fuzz_messages, fuzz_responses
from .fuzzing import PART, PARTS, QUICK, Target, batches, outcome

TARGETS = {
    target.dialect.name: target
    for target in (fuzz_chat.TARGET, fuzz_responses.TARGET, fuzz_messages.TARGET, fuzz_gemini.TARGET)
}
ANY = pytest.mark.parametrize("name", TARGETS)
LONG = (pytest.mark.fuzz, pytest.mark.timeout(1800))


def test_every_dialect_is_fuzzed() -> None:
    assert list(TARGETS) == [dialect().name for dialect in DIALECTS]


@ANY
def test_any_body_is_taken_or_clearly_refused(name: str) -> None:
    target = TARGETS[name]

    @QUICK
    @given(batches(target.whole), st.booleans())
    def go(bodies: list[bytes], strict: bool) -> None:
        for body in bodies:
            outcome(target, body, strict=strict)

    go()


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@ANY
def test_any_of_many_bodies_is_taken_or_clearly_refused(name: str, part: int, request: pytest.FixtureRequest) -> None:
    target = TARGETS[name]
    number = int(request.config.getoption("--hypothesis-seed") or 0)

    @seed(number * PARTS + part)
    @settings(QUICK, max_examples=PART, database=None)
    @given(batches(target.whole), st.booleans())
    def go(bodies: list[bytes], strict: bool) -> None:
        for body in bodies:
            outcome(target, body, strict=strict)

    go()


@ANY
def test_the_bodies_are_neither_all_refused_nor_all_taken(name: str) -> None:
    """Else the tests above would say little."""
    target = TARGETS[name]
    taken: list[bool] = []

    @settings(QUICK, max_examples=100, database=None)
    @given(batches(target.whole))
    def go(bodies: list[bytes]) -> None:
        taken.extend(outcome(target, body, strict=False) is not None for body in bodies)

    go()
    assert 0.1 < sum(taken) / len(taken) < 0.8


class _Broken:
    """A dialect with one fault for each body."""

    def __init__(self, dialect: Any) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)

    def parse(self, body: bytes, **kwargs: Any) -> Request:
        fault = json.loads(body)
        if fault == "crash":
            raise KeyError("role")
        if fault == "ours":
            raise WireError(500, "internal_error", "the proxy failed")
        if fault == "silent":
            raise WireError(400, "invalid_request", "")
        raise WireError(400, "invalid_request", "no")


@pytest.mark.parametrize("fault", ["crash", "ours", "silent"])
@ANY
def test_a_fault_is_noticed(name: str, fault: str) -> None:
    target = TARGETS[name]
    broken = Target(
        dialect=_Broken(target.dialect), whole=target.whole, answered=target.answered, refused=target.refused
    )
    assert outcome(broken, b'"plain"', strict=False) is None
    with pytest.raises((KeyError, AssertionError)):
        outcome(broken, json.dumps(fault).encode(), strict=False)


class OneSession:
    """A session that knows these answers, and what its earlier requests held."""

    def __init__(self, known: Memory) -> None:
        self.reasoning = known.reasoning
        self.answered = known.answered
        self.rereading = Rereading()


def understood(target: Target, body: bytes, memory: Memory, *, strict: bool) -> Any:
    """All that comes of a body, or how it is refused."""
    try:
        request = target.dialect.parse(body, strict=strict, address=target.address, memory=memory)
    except WireError as error:
        return error.status, error.code, error.message
    return request, json.dumps(request.raw)


@ANY
@pytest.mark.parametrize("part", [pytest.param(-1, id="few"), *(pytest.param(n, marks=LONG) for n in range(PARTS))])
def test_a_session_reads_each_body_as_it_would_be_read_alone(
    name: str, part: int, request: pytest.FixtureRequest
) -> None:
    """Bodies that go on from one another, in any mixture, in one session (`wire.rereading`)."""
    target = TARGETS[name]
    number = int(request.config.getoption("--hypothesis-seed") or 0)

    @seed(number * PARTS + part)
    @settings(QUICK, max_examples=PART // 10 if part >= 0 else 50, database=None)
    @given(st.lists(target.whole, min_size=2, max_size=3), st.lists(st.integers(0, 4), min_size=2), st.booleans())
    def go(bodies: list[dict[str, Any]], cuts: list[int], strict: bool) -> None:
        memory = OneSession(target.memory())
        for body, cut in zip(bodies, cuts, strict=False):
            for field in LISTS:
                first, mine = bodies[0].get(field), body.get(field)
                if isinstance(first, list) and isinstance(mine, list):
                    body = {**body, field: [*first[:cut], *mine]}
            data = json.dumps(body).encode()
            alone = understood(target, data, target.memory(), strict=strict)
            assert understood(target, data, memory, strict=strict) == alone

    go()
