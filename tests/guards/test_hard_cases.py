"""Every hard case of kinds T and B has its line in docs/hard-cases.md, and the tests that it names are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ("A8", "A13", "A14", "A15", "A17", "A18", "A30", "A31", "A33", "A40")
REPORTS = (
    "verl#3960", "rllm#352", "AReaL#582", "harmony#27", "trl#6250", "agent-lightning#560", "verl#4050",
    "prime-rl#1703", "cua#289",
)  # fmt: skip


def lines(page: str) -> dict[str, list[str]]:
    """First word of every line of the table → the tests that it names."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "::" in line]
    return {row[0].removeprefix("| ").split()[0].rstrip(","): re.findall(r"`([^`]+::[^`]+)`", row[2]) for row in rows}


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(named: list[str]) -> list[str]:
    """What of these is no test of ours."""
    found = [name.partition("::") for name in named]
    return [
        f"{file}::{test}" for file, _, test in found
        if not (ROOT / file).is_file() or not test.startswith("test_") or test not in functions(ROOT / file)
    ]  # fmt: skip


PAGE = lines((ROOT / "docs/hard-cases.md").read_text("utf-8"))


def test_every_case_has_a_line() -> None:
    assert tuple(PAGE) == (*CASES, *REPORTS)


@pytest.mark.parametrize("case", PAGE)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    assert PAGE[case] and missing(PAGE[case]) == []


def test_a_test_that_is_gone_is_seen() -> None:
    page = lines("| A8 x | rule | `tests/guards/test_hard_cases.py::test_gone`, `tests/nowhere.py::test_x` |")
    assert missing(page["A8"]) == ["tests/guards/test_hard_cases.py::test_gone", "tests/nowhere.py::test_x"]
    assert missing(["tests/guards/test_hard_cases.py::test_every_case_has_a_line"]) == []
