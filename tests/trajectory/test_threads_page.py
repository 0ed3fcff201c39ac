"""The page says how each harness is recognised; it holds the table that the code uses."""

from __future__ import annotations

from pathlib import Path

from openforgerl.trajectory.signs import OPENING_WORDS, SUBAGENT_HEADERS, markdown

PAGE = (Path(__file__).parents[2] / "docs" / "threads.md").read_text("utf-8")


def test_the_page_holds_the_table_of_the_code() -> None:
    assert f"\n{markdown()}\n" in PAGE


def test_every_sign_has_its_line() -> None:
    lines = markdown().splitlines()
    for header in SUBAGENT_HEADERS:
        assert any(line.startswith(f"| {header.harness} | subagent |") and header.announces in line for line in lines)
    for words in OPENING_WORDS:
        assert any(line.startswith(f"| {words.harness} | {words.role} |") and words.words in line for line in lines)
