"""The published page is made from the recorded results, and neither hides anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .expected import expected
from .matrix import RECORD, merged, page, write_cell
from .rows import ROWS
from .speech import SPEECH

PUBLISHED: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))


def cell(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "harness": "pi",
        "version": "1.6.0",
        "user_agents": ["pi/1.6.0"],
        "row": "cut",
        "result": "pass",
        "fact": "",
        "ended": "finished",
        "passed": True,
        "calls": 4,
        "threads": {"main": 1},
        "sampled": 82,
        "trained": 76,
        "masked": {},
        "dropped": {"error": 6},
        "date": "2026-01-02",
    }
    return {**made, **changes}


def test_the_page_is_made_from_the_record() -> None:
    assert page(PUBLISHED) == RECORD.with_suffix(".md").read_text("utf-8")


def test_the_record_agrees_with_what_the_tests_expect() -> None:
    for harness, about in PUBLISHED.items():
        for row, result in about["rows"].items():
            wanted = expected(harness, row)
            assert (result["ended"], result["passed"]) == (wanted.ended, wanted.passed), (harness, row)
            assert (result["result"], result["fact"]) == ("fact" if wanted.fact else "pass", wanted.fact), (
                harness,
                row,
            )
            assert result["threads"] == wanted.threads, (harness, row)
            assert result.get("pictures", 0) == wanted.pictures, (harness, row)
            assert set(result["masked"]) == wanted.masked, (harness, row)
            assert set(result["dropped"]) == wanted.dropped, (harness, row)
            lost = sum(result["masked"].values()) + sum(result["dropped"].values())
            assert result["sampled"] == result["trained"] + lost, (harness, row)


def test_the_record_names_only_what_is_run() -> None:
    assert set(PUBLISHED) <= set(SPEECH)


def test_a_new_result_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write_cell(path, cell(result="FAIL"))
    write_cell(path, cell(row="parallel", date="2026-01-03", dropped={}, sampled=76))
    write_cell(path, cell(fact="It stops.", result="fact"))
    record = json.loads(path.read_text("utf-8"))
    assert list(record["pi"]["rows"]) == ["parallel", "cut"]  # in the order of the rows, not of the runs
    assert record["pi"]["rows"]["cut"]["result"] == "fact"
    text = path.with_suffix(".md").read_text("utf-8")
    assert "| **cut**: a model that fails in the middle of an answer | fact [1] |" in text
    assert "1. pi, cut: It stops. Of 82 sampled, 6 tokens dropped: error." in text
    assert "| **500**: 500, then an answer | not run |" in text
    assert "| **sub-agent**: a sub-agent does the work | - |" in text
    assert "Run on 2026-01-02, 2026-01-03." in text


def test_rows_that_a_harness_lacks_are_not_called_passed() -> None:
    shown = page(merged({}, cell()))
    assert shown.count("| pass") == 1
    assert shown.count("not run |") == len(ROWS) - 2  # all but the one that ran and the sub-agent that pi has not
