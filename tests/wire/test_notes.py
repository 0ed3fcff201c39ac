"""One rule for unlisted fields in every dialect: null is absent, others are noted once, `strict` refuses the first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openforgerl.errors import WireError
from openforgerl.wire import DIALECTS, Dialect

SAID = {"role": "user", "content": "hi"}
BODIES: dict[str, Any] = {
    "chat": lambda extra: {"messages": [{**SAID, **extra}, {**SAID, **extra}], **extra},
    "responses": lambda extra: {"input": [{"type": "message", **SAID, **extra}] * 2, **extra},
    "messages": lambda extra: {"messages": [{**SAID, **extra}] * 2, **extra},
    "gemini": lambda extra: {"contents": [{"parts": [{"text": "hi"}], **extra}] * 2, **extra},
}
PLACES = {
    "chat": ("messages[]", "messages[0]"),
    "responses": ("input[].message", "input[0]"),
    "messages": ("messages[]", "messages[0]"),
    "gemini": ("contents[]", "contents[0]"),
}
ALL = pytest.mark.parametrize("dialect", [make() for make in DIALECTS], ids=lambda dialect: dialect.name)


@ALL
def test_an_unlisted_field_is_noted_once_wherever_it_stands(dialect: Dialect) -> None:
    body = json.dumps(BODIES[dialect.name]({"shiny": 0})).encode()
    where, _ = PLACES[dialect.name]
    assert dialect.parse(body).unlisted == ("shiny", f"{where}.shiny")


@ALL
def test_null_is_absent_strict_or_not(dialect: Dialect) -> None:
    body = json.dumps(BODIES[dialect.name]({"shiny": None})).encode()
    assert dialect.parse(body, strict=True).unlisted == () == dialect.parse(body).unlisted


@ALL
def test_strict_refuses_the_body_s_own_field_first_and_then_the_first_inside(dialect: Dialect) -> None:
    whole = BODIES[dialect.name]({"shiny": False})
    with pytest.raises(WireError, match=r"^shiny: unknown field$") as caught:
        dialect.parse(json.dumps(whole).encode(), strict=True)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unlisted_field", "shiny")
    del whole["shiny"]
    _, path = PLACES[dialect.name]
    with pytest.raises(WireError) as caught:
        dialect.parse(json.dumps(whole).encode(), strict=True)
    assert (caught.value.code, caught.value.param) == ("unlisted_field", f"{path}.shiny")
