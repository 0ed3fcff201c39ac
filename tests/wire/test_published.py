"""The published field table is the one that the code uses, and every error code is in the list."""

from __future__ import annotations

import re
from pathlib import Path

import openforgerl
from openforgerl.wire import CHAT

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "wire.md").read_text("utf-8")
PAGES = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("wire*.md")))
OURS = {"session_exists"}
"""Codes of the control port only."""
PACKAGE = Path(openforgerl.__file__).parent


def test_the_page_holds_the_table_of_the_code() -> None:
    assert CHAT.markdown() in PAGE


def test_a_changed_table_is_noticed() -> None:
    fewer = type(CHAT)(CHAT.dialect, CHAT.fields[1:])
    assert fewer.markdown() not in PAGE


def test_every_error_code_is_published() -> None:
    """Codes are the second argument of WireError, in the rooms that agents hear from."""
    rooms = ("data_app", "exchange", "failures", "prompting", "sessions")
    files = [*PACKAGE.glob("wire/*.py"), *(PACKAGE / "proxy" / f"{name}.py" for name in rooms)]
    source = "\n".join(path.read_text("utf-8") for path in files)
    codes = set(re.findall(r'WireError\(\s*[\w.]+,\s*"(\w+)"', source))
    assert "session_closed" in codes
    assert {code for code in codes if f"`{code}`" not in PAGES} - OURS == set()
