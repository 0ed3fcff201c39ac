"""The demo unchanged but for where its attempts run: every stage, cut down to one step."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from openforgerl.sandboxes.container_engine import find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.store import Database, RunStore
from openforgerl.types import Attempt, Verdict

SETTINGS = (
    *("demo.sft_tasks=2", "demo.validation_tasks=1", "demo.teacher_rollouts=1", "demo.eval_tasks=1"),
    *("sft.steps=4", "sft.validate_every=1", "train.steps=1", "train.groups_per_step=2", "train.group_size=2"),
    *("engine.threads=1", "run.concurrency=4"),
)


async def attempts(folder: Path) -> list[Attempt]:
    database = Database.read_only(folder / "run.sqlite")
    try:
        return list(await RunStore(database).attempts())
    finally:
        await database.close()


@pytest.mark.container
def test_the_react_demo_runs_in_containers(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("openforgerl")),
        "demo",
        "--harness",
        "react",
        "--sandbox",
        "container",
    ]
    command += ["--run", str(tmp_path / "run"), *(word for setting in SETTINGS for word in ("-s", setting))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "run/config.json").read_text())["backend"] == "container"
    ran = asyncio.run(attempts(tmp_path / "run"))
    purposes = Counter(type(attempt.outcome).__name__ for attempt in ran)
    assert purposes == {"Verdict": len(ran)}
    assert any(isinstance(attempt.outcome, Verdict) and attempt.outcome.passed for attempt in ran)  # the teacher's
    for attempt in ran:
        sandbox = attempt.sandbox
        assert (sandbox["backend"], sandbox["capabilities"], sandbox["no_new_privileges"]) == (
            "container",
            "0" * 16,
            True,
        )
        assert sandbox["image"]["id"].startswith("sha256:") and sandbox["runtime"].startswith("sha256:")
    engine = find_engine(ContainerOptions())
    code, out, _ = asyncio.run(engine.call("ps", "--all", "--format", "{{.Mounts}}"))
    assert code == 0 and str(tmp_path) not in out
    assert list((tmp_path / "run/sandboxes").rglob("record.json")) == []
