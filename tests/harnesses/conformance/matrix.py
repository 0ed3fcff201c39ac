"""The published matrix: what the last run of every row showed, kept as JSON and shown as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .rows import ROWS, Row
from .speech import SPEECH

DOCS = Path(__file__).parents[3] / "docs"
RECORD = DOCS / "harness-matrix.json"
VARIABLE = "OPENFORGERL_MATRIX"
"""Environment variable: the file that a test run writes its results into; unset = nowhere."""

HEAD = """# Which harness does what

Every cell is one attempt with the real program in the process sandbox, against the real proxy, store and verifier; only
the model is scripted (`tests/harnesses/conformance/`). Made from [harness-matrix.json](harness-matrix.json), which

```
OPENFORGERL_MATRIX=docs/harness-matrix.json pytest -m "slow or not slow" tests/harnesses/conformance/test_conformance.py
```

writes (add `-k` for a part; the rest stays as it was). A test compares the two.

*pass*: the right file, the right verdict, the threads that the row is about, no call unattributed, and every sampled
token trained, or left out for the reason that the footnote names. *fact*: what the harness itself does instead, checked
just as strictly. *-*: the harness, as it is run here, has no such thing. *not run*: not run yet.
"""


def merged(record: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """The record with one more result, in place of an older one of the same harness and row."""
    harness = {**record.get(cell["harness"], {}), "version": cell["version"], "user_agents": cell["user_agents"]}
    kept = {name: value for name, value in cell.items() if name not in ("harness", "version", "user_agents", "row")}
    rows = {**harness.get("rows", {}), cell["row"]: kept}
    return {**record, cell["harness"]: {**harness, "rows": {name: rows[name] for name in ROWS if name in rows}}}


def write_cell(path: Path, cell: dict[str, Any]) -> None:
    """Put one result into the file at `path`, made when missing, and the page of all results beside it."""
    record = merged(json.loads(path.read_text("utf-8")) if path.exists() else {}, cell)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path)
    path.with_suffix(".md").write_text(page(record), "utf-8")


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    harnesses = [name for name in SPEECH if name in record]
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{name} {record[name]['version']}" for name in harnesses) + " |",
        "| --- |" + " --- |" * len(harnesses),
    ]
    for row in ROWS.values():
        cells = [_cell(record[name], name, row, notes) for name in harnesses]
        lines.append(f"| **{row.name}**: {row.about} | " + " | ".join(cells) + " |")
    dates = sorted({cell["date"] for name in harnesses for cell in record[name]["rows"].values()})
    when = "Run on " + ", ".join(dates) + "."
    agents = [
        f"| {name} | {record[name]['version']} | {', '.join(f'`{each}`' for each in record[name]['user_agents'])} |"
        for name in harnesses
    ]
    return "\n".join(
        [
            HEAD,
            *lines,
            "",
            when,
            "",
            "## What the numbers say",
            "",
            *[f"{number}. {note}" for number, note in enumerate(notes, 1)],
            "",
            "## How each introduces itself",
            "",
            "| harness | version | User-Agent |",
            "| --- | --- | --- |",
            *agents,
            "",
        ]
    )


def _cell(harness: dict[str, Any], name: str, row: Row, notes: list[str]) -> str:
    if row.only and name not in row.only:
        return "-"
    result = harness["rows"].get(row.name)
    if result is None:
        return "not run"
    lost = [f"{count} tokens {how}: {why}" for how in ("masked", "dropped") for why, count in result[how].items()]
    parts = [result["fact"], f"Of {result['sampled']} sampled, {', '.join(lost)}." if lost else ""]
    note = " ".join(part for part in parts if part)
    if not note:
        return result["result"]
    notes.append(f"{name}, {row.name}: {note}")
    return f"{result['result']} [{len(notes)}]"
