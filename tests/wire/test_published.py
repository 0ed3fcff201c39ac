"""The published field table is the one that the code uses, and every error code is in the list."""

from __future__ import annotations

import re
from pathlib import Path

import openforgerl
from openforgerl.wire import CHAT

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
PACKAGE = Path(openforgerl.__file__).parent


def test_the_page_holds_the_table_of_the_code() -> None:
    assert CHAT.markdown() in PAGE


def test_a_changed_table_is_noticed() -> None:
    fewer = type(CHAT)(CHAT.dialect, CHAT.fields[1:])
    assert fewer.markdown() not in PAGE


def test_every_error_code_is_published() -> None:
    """Codes are the second argument of WireError, in the rooms that agents hear from."""
    files = [*PACKAGE.glob("wire/*.py"), *(PACKAGE / "proxy" / f"{name}.py" for name in ("data_app", "exchange"))]
    source = "\n".join(path.read_text("utf-8") for path in files)
    codes = set(re.findall(r'WireError\(\s*[\w.]+,\s*"(\w+)"', source))
    assert "session_closed" in codes
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()
