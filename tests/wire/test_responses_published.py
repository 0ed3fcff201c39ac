"""The published field table of Responses is the one that the code uses."""

from __future__ import annotations

from pathlib import Path

from openforgerl.wire.notes import Notes
from openforgerl.wire.responses_fields import RESPONSES
from openforgerl.wire.responses_input import InputReader

from .responses_client import Remembered

PAGE = (Path(__file__).parents[2] / "docs" / "wire-responses.md").read_text("utf-8")


def test_the_page_holds_the_table_of_the_code() -> None:
    assert RESPONSES.markdown() in PAGE


def test_a_changed_table_is_noticed() -> None:
    fewer = type(RESPONSES)(RESPONSES.dialect, RESPONSES.fields[1:])
    assert fewer.markdown() not in PAGE


def test_every_kind_of_item_is_published() -> None:
    kinds = InputReader(Remembered(), Notes()).kinds
    assert "custom_tool_call_output" in kinds
    assert [kind for kind in kinds if f"`{kind}`" not in PAGE] == []
