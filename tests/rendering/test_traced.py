"""A traced string behaves as the string it is, and never gives data's characters to the template.

Upper-case letters are the template's and lower-case ones are data in these tests, so the right origin of every
character of a result can be read off the character itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, Traced, concat, expand, formatted, make, runs_of, uniform

DATA = 7


def traced(text: str) -> Traced:
    return concat([uniform(char, DATA if char.islower() else TEMPLATE) for char in text])


def right(char: str) -> int:
    return DATA if char.islower() else TEMPLATE


def check(result: Any, plain: Any) -> None:
    if isinstance(plain, list | tuple):
        assert len(result) == len(plain)
        for one, other in zip(result, plain, strict=True):
            check(one, other)
        return
    assert str.__str__(result) == plain
    assert isinstance(result, Traced)
    assert expand(result) == [right(char) for char in plain]
    assert all(length > 0 for length, _ in runs_of(result))


TEXT = st.text(alphabet="abAB \n-", max_size=14)
SMALL = st.text(alphabet="abA -", min_size=1, max_size=2)
NUMBER = st.integers(-4, 16)


@given(text=TEXT, sep=SMALL, other=TEXT, i=NUMBER, j=NUMBER, step=st.sampled_from([1, 2, -1, -2]))
def test_operations_follow_every_character(text: str, sep: str, other: str, i: int, j: int, step: int) -> None:
    t, o, s = traced(text), traced(other), traced(sep)
    operations: list[Callable[[Any, Any, Any], Any]] = [
        lambda t, o, s: t + o,
        lambda t, o, s: t * 2,
        lambda t, o, s: 3 * t,
        lambda t, o, s: t[i:j],
        lambda t, o, s: t[i:j:step],
        lambda t, o, s: [*t],
        lambda t, o, s: t.strip(),
        lambda t, o, s: t.lstrip(),
        lambda t, o, s: t.rstrip(),
        lambda t, o, s: t.strip(s),
        lambda t, o, s: t.split(),
        lambda t, o, s: t.split(s),
        lambda t, o, s: t.split(None, 1),
        lambda t, o, s: t.split(s, 1),
        lambda t, o, s: t.rsplit(),
        lambda t, o, s: t.rsplit(None, 1),
        lambda t, o, s: t.rsplit(s, 1),
        lambda t, o, s: t.partition(s),
        lambda t, o, s: t.rpartition(s),
        lambda t, o, s: t.splitlines(),
        lambda t, o, s: t.splitlines(True),
        lambda t, o, s: t.replace(s, o),
        lambda t, o, s: t.replace(s, o, 1),
        lambda t, o, s: s.join([t, o, t]),
        lambda t, o, s: t.removeprefix(s),
        lambda t, o, s: t.removesuffix(s),
    ]
    for operation in operations:
        check(operation(t, o, s), operation(text, other, sep))
    if text:
        check(t[-1], text[-1])
    assert t == text
    assert hash(t) == hash(text)
    assert {t: 1}[text] == 1


@given(text=TEXT, other=TEXT)
def test_formatting_follows_arguments(text: str, other: str) -> None:
    t, o = traced(text), traced(other)
    check(formatted(uniform("A%s-B%5s%%", TEMPLATE), (t, o), {}, lambda f, a, _: f % a), f"A{text}-B{other:>5}%")
    check(
        formatted(uniform("A{x}-{0:.3}", TEMPLATE), (t,), {"x": o}, lambda f, a, k: f.format(*a, **k)),
        f"A{other}-{text:.3}",
    )


def test_what_cannot_be_followed_is_never_the_templates() -> None:
    data, template = uniform("ab", DATA), uniform("AB", TEMPLATE)
    assert set(expand(uniform("x", TEMPLATE).center(5, "z"))) == {UNKNOWN}  # a plain fill: nobody knows
    assert set(expand(concat([template, data]).zfill(9))) == {DATA}
    assert set(expand(formatted("%r", (data,), {}, lambda f, a, _: f % a))) == {DATA}
    assert set(expand(formatted(template, ({"k": data},), {}, lambda f, a, _: f + str(a[0])))) == {UNKNOWN}
    assert runs_of("plain") == ((5, UNKNOWN),)
    assert expand(uniform("stra\u00dfe", DATA).upper()) == [DATA] * 7  # longer than before


def test_case_changes_keep_places() -> None:
    mixed = make("xY", ((1, DATA), (1, TEMPLATE)))
    for changed in (mixed.upper(), mixed.lower(), mixed.title(), mixed.capitalize(), mixed.swapcase()):
        assert expand(changed) == [DATA, TEMPLATE]


def test_joining_refuses_what_str_refuses() -> None:
    with pytest.raises(TypeError, match="sequence item 1: expected str instance, int found"):
        uniform(",", TEMPLATE).join(["a", 1])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        uniform("a", TEMPLATE) + 1  # type: ignore[operator]


def test_formatting_is_not_confused_by_its_own_placeholders() -> None:
    odd = uniform("\U000f0000\U000f0001", DATA)
    assert expand(formatted(uniform("<%s>", TEMPLATE), (odd,), {}, lambda f, a, _: f % a)) == [-1, DATA, DATA, -1]
    assert set(expand(formatted(odd + uniform("%s", DATA), (odd,), {}, lambda f, a, _: f % a))) == {DATA}
