"""kill -9 while attempts run in containers: what is left has no process; the same command removes it and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openforgerl.sandboxes.container_engine import find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.store import Database, RunStore
from openforgerl.types import Attempt, Verdict

SETTINGS = (
    *("demo.sft_tasks=2", "demo.validation_tasks=1", "demo.teacher_rollouts=1", "demo.eval_tasks=1"),
    *("sft.steps=4", "sft.validate_every=1", "train.steps=1", "train.groups_per_step=2", "train.group_size=2"),
    *("engine.threads=1", "run.concurrency=2"),
)
SCHEDULE = (("mid_commit", 1), ("mid_verification", 1), ("mid_verification", 2), ("mid_verification", 3), ("none", 0))


def life(folder: Path, point: str, count: int) -> int:
    settings = [word for setting in SETTINGS for word in ("-s", setting)]
    command = [sys.executable, str(Path(__file__).with_name("drive.py")), point, str(count), "--"]
    command += ["--harness", "react", "--sandbox", "container", "--run", str(folder), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, -signal.SIGKILL), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode


async def containers(run_id: str, *filters: str) -> list[str]:
    words = [word for text in (f"label=openforgerl.run={run_id}", *filters) for word in ("--filter", text)]
    code, out, err = await find_engine(ContainerOptions()).call("ps", "--all", *words, "--format", "{{.Names}}")
    assert code == 0, err
    return out.split()


async def attempts(folder: Path) -> dict[str, Attempt]:
    database = Database.read_only(folder / "run.sqlite")
    found = {attempt.attempt_id: attempt for attempt in await RunStore(database).attempts() if attempt.outcome}
    await database.close()
    return found


def run_of(folder: Path) -> str:
    """The run's id, from the records of what it left."""
    (record, *_) = (folder / "sandboxes/containers").glob("*/record.json")
    return record.read_text().partition('"run_id":"')[2].partition('"')[0]


@pytest.mark.slow
@pytest.mark.container
@pytest.mark.timeout(1200)
def test_killed_runs_in_containers_go_on(tmp_path: Path) -> None:
    folder, run_id, kept = tmp_path / "run", "", dict[str, Attempt]()
    for point, count in SCHEDULE:
        code = life(folder, point, count)
        assert (code == 0) == (point == "none")
        now = asyncio.run(attempts(folder))
        assert kept.items() <= now.items(), "a finished attempt changed or was lost"
        kept = now
        if point == "none":
            break
        run_id = run_id or run_of(folder)
        deadline = time.monotonic() + 40  # one that had just been started waits 30 s for somebody at its socket
        while asyncio.run(containers(run_id, "status=running")) and time.monotonic() < deadline:
            time.sleep(0.3)
        assert asyncio.run(containers(run_id, "status=running")) == []
    assert run_id
    assert asyncio.run(containers(run_id)) == []
    assert list((folder / "sandboxes").rglob("record.json")) == []
    last = {attempt.rollout_id: attempt for attempt in sorted(kept.values(), key=lambda attempt: attempt.number)}
    assert all(isinstance(attempt.outcome, Verdict) for attempt in last.values())
