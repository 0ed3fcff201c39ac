"""docs/failures.md names every kind of failure that the source gives, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from .failure_kinds import kinds

ROOT = Path(__file__).parents[2]


def documented() -> set[str]:
    rows = re.findall(r"^\| (?:any|[a-z]+) \| `([a-z_*]+)` \|", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    return set(rows)


def test_every_kind_is_in_the_table_and_no_other() -> None:
    assert documented() == kinds(ROOT / "src/openforgerl")


def test_a_new_kind_is_seen(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "new.py").write_text(
        'raise StageError(Stage.RUN, "brand_new", "text", origin=o, retryable=True)\n'
        'kind = "a" if x else "b_c"\n'
        'Failure(stage=s, kind="by_name", origin=o, message="m", retryable=False)\n'
    )
    assert kinds(tmp_path) == {"brand_new", "a", "b_c", "by_name"}
