"""Every real harness through every row: the file, the verdict, the threads, and where every sampled token went.

Every row of pi, codex and claude-code and the core rows of gemini-cli and qwen-code but their cut streams run with the
other tests; the rest is `slow`, and so is every row that waits for a minute. With OPENFORGERL_MATRIX set to a file, the
results are written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from openforgerl import plugins
from openforgerl.harnesses.catalogue import install
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.protocols import Harness
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.tiny_model import write_tiny_model

from .attempts import Ran, run_row
from .expected import FACTS, Expected, expected, seen
from .matrix import VARIABLE, write_cell
from .rows import CORE, ROWS
from .speech import SPEECH

EVERY_ROW = ("pi", "codex", "claude-code")
BY_HAND = ("opencode", "openclaw", "mini-swe-agent")
"""Harnesses that take ten to thirty CPU seconds an attempt, and hundreds of megabytes to install."""
CHANCY = (("gemini-cli", "cut"), ("qwen-code", "cut"))
"""What these do depends on whether they read our error before they see the connection close: gemini-cli asks again in
the first case and gives up in the other."""
HEAVY = ("silent-minute",)
"""Rows that take a minute of waiting, or more, with any harness."""


def cells() -> Iterator[object]:
    for harness in SPEECH:
        for row in ROWS.values():
            if row.only and harness not in row.only:
                continue
            wanted = harness in EVERY_ROW or (row.name in CORE and harness not in BY_HAND)
            sure = row.name not in HEAVY and (harness, row.name) not in CHANCY
            marks = () if wanted and sure else (pytest.mark.slow,)
            yield pytest.param(harness, row.name, id=f"{harness}-{row.name}", marks=marks)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@cache
def installed(name: str, folder: Path) -> Harness:
    """Adapter of the harness, installed when it was not; its files are compared with the pinned digests once."""
    install(name, folder, lambda line: print(line))
    return plugins.load("harness", name)(HarnessOptions(cache=str(folder)))


@pytest.mark.sandbox
@pytest.mark.node
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("harness", "row"), list(cells()))
async def test_row(harness: str, row: str, harness_cache: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
    adapter = installed(harness, harness_cache)
    ran = await run_row(tmp_path, renderer, adapter, ROWS[row], SPEECH[harness])
    wanted = expected(harness, row)
    found = seen(ran, wanted.fact)
    report = adapter.report()
    introduced = bool(ran.user_agents) and all(each.startswith(str(report["user_agent"])) for each in ran.user_agents)
    record(harness, str(report["version"]), row, ran, wanted, good=introduced and found == wanted)
    assert found == wanted, ran.told()
    assert introduced, ran.user_agents


def record(harness: str, version: str, row: str, ran: Ran, wanted: Expected, *, good: bool) -> None:
    """Into the matrix, before anything is asserted: a fault shows there too."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    result = ("fact" if wanted.fact else "pass") if good else "FAIL"
    write_cell(
        Path(path),
        {
            "harness": harness,
            "version": version,
            "user_agents": list(ran.user_agents),
            "row": row,
            "result": result,
            "fact": wanted.fact,
            "ended": ran.ended,
            "passed": ran.passed,
            "calls": len(ran.calls),
            "threads": ran.threads,
            "sampled": ran.totals.sampled,
            "trained": ran.totals.trained,
            "masked": ran.totals.masked,
            "dropped": ran.totals.dropped,
            "date": datetime.now(UTC).date().isoformat(),
        },
    )


def test_every_entry_is_about_a_row_that_is_run() -> None:
    for harness, row in FACTS:
        assert harness in SPEECH
        assert row in ROWS
        assert not ROWS[row].only or harness in ROWS[row].only
