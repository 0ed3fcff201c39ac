"""The demo, cut down, with every rollout in a pod of the fake cluster: real processes, one GRPO step."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, LEASE, POD, selector
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.names import APP, APP_LABEL
from openforgerl.store import Database, RunStore
from openforgerl.types import Attempt, Verdict

OPENFORGERL = str(Path(sys.executable).with_name("openforgerl"))
SETTINGS = (
    *("demo.sft_tasks=2", "demo.validation_tasks=1", "demo.teacher_rollouts=1", "demo.eval_tasks=1"),
    *("sft.steps=2", "sft.validate_every=1", "train.steps=1", "train.groups_per_step=1", "train.group_size=2"),
    *("engine.threads=1", "run.concurrency=4", "limits.memory_mb=512"),
    *("sandbox.kubernetes.image=base:1", "sandbox.kubernetes.grace=1"),
)


async def leftovers(kubeconfig: Path) -> list[str]:
    """Names of all objects of ours in the cluster."""
    cluster = HttpCluster(find_access(str(kubeconfig), "", os.environ))
    labels = selector({APP_LABEL: APP})
    try:
        lists = [await cluster.list(kind, labels=labels) for kind in (POD, CONFIG_MAP, LEASE)]
    finally:
        await cluster.close()
    return [item["metadata"]["name"] for found in lists for item in found.items]


async def attempts(folder: Path) -> list[Attempt]:
    """All of a run."""
    database = Database.read_only(folder / "run.sqlite")
    found = list(await RunStore(database).attempts())
    await database.close()
    return found


@pytest.mark.sandbox
@pytest.mark.timeout(600)
def test_the_demo_runs_unchanged_in_pods(served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [word for setting in SETTINGS for word in ("-s", setting)]
    words = [OPENFORGERL, "demo", "--harness", "react", "--sandbox", "kubernetes", "--run", str(folder), *settings]
    begun = time.monotonic()
    environment = {**os.environ, "KUBECONFIG": str(served), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print(f"\n{time.monotonic() - begun:.0f} s")
    report = json.loads((folder / "report.json").read_text())
    assert report["rl"]["steps"] == 1
    found = asyncio.run(attempts(folder))
    graded = [attempt for attempt in found if isinstance(attempt.outcome, Verdict)]
    assert len(graded) >= 8  # teacher, validation, three measurements, a group
    assert {attempt.sandbox["backend"] for attempt in graded} == {"kubernetes"}
    assert len({attempt.sandbox["pod"] for attempt in graded}) == len(graded)  # a pod each
    assert asyncio.run(leftovers(served)) == []
