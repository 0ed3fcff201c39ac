"""The `bench` fixture for every test here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openforgerl.store import Database, RunStore
from openforgerl.testing.fake_sandbox import FakeSandbox, FakeSandboxes, Program
from openforgerl.types import Exit, Task

from .bench import Bench, FakeSessions, RewardFromIndex


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async def write_result(sandbox: FakeSandbox, program: Program) -> Exit:
        sandbox.files["/workspace/out.txt"] = b"done"
        return Exit(code=0)

    database = Database.open(tmp_path / "run.sqlite")
    await RunStore(database).put_run("run", "digest")
    tasks = [
        Task(name=f"t/{letter}", digest=letter * 64, path="/t", instruction="do it", agent_timeout=5.0)
        for letter in "ab"
    ]
    yield Bench(tmp_path, database, FakeSessions(), FakeSandboxes(behaviour=write_result), RewardFromIndex(), tasks)
    await database.close()
