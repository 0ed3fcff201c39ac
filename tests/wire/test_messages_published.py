"""The published page of the Messages dialect is the one that the code follows."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import ContextOverflow, WireError
from openforgerl.wire import MESSAGES, MessagesDialect
from openforgerl.wire.messages_answers import input_of

PAGE = (Path(__file__).parents[2] / "docs" / "wire-messages.md").read_text("utf-8")
DIALECT = MessagesDialect()


def test_the_page_holds_the_table_of_the_code() -> None:
    assert MESSAGES.markdown() in PAGE


def test_a_changed_table_is_noticed() -> None:
    fewer = type(MESSAGES)(MESSAGES.dialect, MESSAGES.fields[1:])
    assert fewer.markdown() not in PAGE


def test_the_table_of_errors_is_the_codes() -> None:
    rows = re.findall(r"^\| (\d[^|]*) \| `(\w+)`", PAGE, re.MULTILINE)
    assert len(rows) == 9
    for statuses, kind in rows:
        for status in re.findall(r"\d+", statuses):
            error = WireError(int(status), "x", "no")
            assert DIALECT.error(error)["error"]["type"] == kind
            assert str(DIALECT.status(error)) in statuses


def test_the_rule_of_inputs_is_the_codes() -> None:
    form = msgspec.json.encode(input_of("TEXT")).decode()
    shown = '{"__unparsedToolInput": {"raw": TEXT, "len": LENGTH}}'
    assert shown in PAGE
    assert form == shown.replace(" ", "").replace("TEXT", '"TEXT"').replace("LENGTH", "4")


@pytest.mark.parametrize("words", ["prompt is too long: N tokens > M maximum"])
def test_the_words_of_an_overflow_are_the_codes(words: str) -> None:
    assert words in PAGE
    message = DIALECT.error(ContextOverflow(9, 5))["error"]["message"]
    assert message == words.replace("N", "9").replace("M", "5")
