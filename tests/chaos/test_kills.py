"""kill -9 at seeded points of the demo's life: the same command resumes, and nothing is lost, doubled or left.

One life of the cut-down demo takes every kill, because each restart is also a resume to check.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from openforgerl.store import Database, RunStore
from openforgerl.types import Attempt, Verdict

SETTINGS = (
    *("demo.sft_tasks=2", "demo.validation_tasks=1", "demo.teacher_rollouts=1", "demo.eval_tasks=1"),
    *("sft.steps=4", "sft.validate_every=1", "train.steps=3", "train.groups_per_step=2", "train.group_size=2"),
    *("engine.threads=1", "run.concurrency=2"),
)
SCHEDULE = (
    *(("mid_commit", 1), ("mid_verification", 1), ("mid_commit", 2), ("mid_verification", 2)),  # the teacher
    *(("mid_sft", 1), ("mid_sft", 2)),
    *(("mid_stream", 0), ("mid_commit", 2), ("mid_verification", 3), ("mid_stream", 0)),  # measuring
    *(("mid_commit", 4), ("mid_stream", 0), ("mid_verification", 4), ("mid_stream", 0)),
    *(("after_checkpoint", 1), ("after_checkpoint", 2), ("before_publish", 1), ("before_publish", 2)),  # GRPO
    *(("after_checkpoint", 1), ("mid_commit", 3)),
)
"""Where each life ends, and at the how-many-th time it gets there (0: drawn from the seed). Early points first, since a
life that does not meet its point runs to the end."""
SEED = 20
ROUND_LIMIT = 240.0
"""Seconds for one process."""


def life(harness: str, folder: Path, temporary: Path, point: str, count: int) -> int:
    """Run the demo until it ends or kills itself; its return code (-9 when killed)."""
    settings = [word for setting in SETTINGS for word in ("-s", setting)]
    command = [sys.executable, str(Path(__file__).with_name("drive.py")), point, str(count), "--"]
    command += ["--harness", harness, "--run", str(folder), *settings]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ROUND_LIMIT)
    assert done.returncode in (0, -signal.SIGKILL), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode


def finished(folder: Path) -> dict[str, bytes]:
    """Every committed attempt and its samples, as bytes."""

    async def read() -> dict[str, bytes]:
        database = Database.read_only(folder / "run.sqlite")
        store = RunStore(database)
        attempts = [attempt for attempt in await store.attempts() if attempt.outcome is not None]
        samples = await store.samples([attempt.attempt_id for attempt in attempts])
        await database.close()
        return {a.attempt_id: msgspec.json.encode((a, samples.get(a.attempt_id))) for a in attempts}

    return asyncio.run(read()) if (folder / "run.sqlite").exists() else {}


def sandbox_processes(folder: Path) -> list[str]:
    """Command lines of living processes that belong to this run's sandboxes (their state folder is in them)."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "bwrap" in line and str(folder) in line:
            found.append(line)
    return found


def named_cgroups(folder: Path) -> set[Path]:
    """The cgroups of sandboxes that a killed process left its records of; other runs' are not our business."""
    records = (path.read_text() for path in (folder / "sandboxes").glob("*.json"))
    return {Path(found) for text in records for found in re.findall(r"/sys/fs/cgroup/[^\"]*openforgerl-\w+", text)}


def gone(folder: Path) -> bool:
    """Sandboxes die with the process that made them; give the kernel a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not sandbox_processes(folder):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.sandbox
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("harness", ["react", pytest.param("pi", marks=(pytest.mark.slow, pytest.mark.node))])
def test_twenty_kills_lose_nothing_double_nothing_and_leave_nothing(harness: str, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    rng = random.Random(SEED)
    cgroups: set[Path] = set()
    mounts_before = Path("/proc/self/mountinfo").read_text()
    kept: dict[str, bytes] = {}
    for number, (point, count) in enumerate(SCHEDULE):
        code = life(harness, folder, temporary, point, count or rng.randint(2, 60))
        assert code == -signal.SIGKILL, f"life {number} ended before it met {point}"
        assert gone(folder), sandbox_processes(folder)
        cgroups |= named_cgroups(folder)
        now = finished(folder)
        assert kept.items() <= now.items(), "a finished attempt changed or was lost"
        kept = now
    assert life(harness, folder, temporary, "none", 0) == 0
    assert kept.items() <= finished(folder).items()
    asyncio.run(check_run(folder))
    assert gone(folder)
    assert cgroups or os.geteuid() != 0, "no killed life left a sandbox record: this test looks at nothing"
    assert [path for path in cgroups if path.exists()] == []
    assert Path("/proc/self/mountinfo").read_text() == mounts_before
    assert list((folder / "carry").iterdir()) == []
    assert [path.name for path in temporary.iterdir() if path.name.startswith("openforgerl")] == []


async def check_run(folder: Path) -> None:
    """Steps are continuous, every attempt trains at most once, every rollout has one last verdict."""
    database = Database.read_only(folder / "run.sqlite")
    store = RunStore(database)
    steps = await store.steps("rl")
    attempts = await store.attempts()
    rollouts = await store.rollouts()
    await database.close()
    assert [step.step for step in steps] == [1, 2, 3]
    trained = [attempt for step in steps for attempt in step.attempt_ids]
    assert len(trained) == len(set(trained)) == 3 * 2 * 2
    last: dict[str, Attempt] = {}
    for attempt in attempts:
        last[attempt.rollout_id] = attempt
    assert {rollout.rollout_id for rollout in rollouts} == set(last)
    assert all(isinstance(attempt.outcome, Verdict) for attempt in last.values())
    assert all(attempt.outcome is not None for attempt in attempts)
