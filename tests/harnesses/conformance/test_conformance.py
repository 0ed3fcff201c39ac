"""Every real harness through every row: the file, the verdict, the threads, and where every sampled token went.

Every row of pi, codex and claude-code and the core rows of all run with the other tests; the rest is `slow`. With
OPENFORGERL_MATRIX set to a file, the results are written there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
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
from openforgerl.testing.tiny_vl import write_tiny_vl

from .attempts import Ran, run_row
from .expected import FACTS, Expected, expected, seen
from .matrix import VARIABLE, write_cell
from .rows import CORE, ROWS
from .speech import SPEECH

pytestmark = [pytest.mark.sandbox, pytest.mark.node, pytest.mark.timeout(900)]
EVERY_ROW = ("pi", "codex", "claude-code")
WAITING = "silent-minute"
"""The row that is a minute of waiting: those of `EVERY_ROW` wait together."""


def cells() -> Iterator[object]:
    for harness in SPEECH:
        for row in ROWS.values():
            if (row.only and harness not in row.only) or (row.name == WAITING and harness in EVERY_ROW):
                continue
            marks = () if harness in EVERY_ROW or row.name in CORE else (pytest.mark.slow,)
            yield pytest.param(harness, row.name, id=f"{harness}-{row.name}", marks=marks)


@cache
def installed(name: str, folder: Path, images: bool = False) -> Harness:
    """Adapter of the harness, installed when it was not; its files are compared with the pinned digests once."""
    install(name, folder, lambda line: print(line))
    return plugins.load("harness", name)(HarnessOptions(cache=str(folder), images=images))


@dataclass(frozen=True)
class Stage:
    """What every attempt needs."""

    cache: Path
    blind: ChatRenderer
    seeing: ChatRenderer

    async def show(self, harness: str, row: str, folder: Path) -> None:
        """Carry a row out, write down what came of it, and compare."""
        pictures = ROWS[row].pictures
        adapter = installed(harness, self.cache, pictures)
        ran = await run_row(folder, self.seeing if pictures else self.blind, adapter, ROWS[row], SPEECH[harness])
        wanted = expected(harness, row)
        found = seen(ran, wanted.fact)
        report = adapter.report()
        names = ran.user_agents
        introduced = bool(names) and all(each.startswith(str(report["user_agent"])) for each in names)
        record(harness, str(report["version"]), row, ran, wanted, good=introduced and found == wanted)
        assert found == wanted, ran.told()
        assert introduced, names


@pytest.fixture(scope="module")
def stage(harness_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    blind = load_renderer(write_tiny_model(tmp_path_factory.mktemp("blind")))
    return Stage(harness_cache, blind, load_renderer(write_tiny_vl(tmp_path_factory.mktemp("seeing"))))


@pytest.mark.parametrize(("harness", "row"), list(cells()))
async def test_row(harness: str, row: str, stage: Stage, tmp_path: Path) -> None:
    await stage.show(harness, row, tmp_path)


async def test_a_silent_minute(stage: Stage, tmp_path: Path) -> None:
    folders = {harness: tmp_path / harness for harness in EVERY_ROW}
    for folder in folders.values():
        folder.mkdir()
    shows = [stage.show(harness, WAITING, folder) for harness, folder in folders.items()]
    failed = [each for each in await asyncio.gather(*shows, return_exceptions=True) if each is not None]
    if failed:
        raise BaseExceptionGroup("a silent minute", failed)


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
            "pictures": ran.pictures,
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
