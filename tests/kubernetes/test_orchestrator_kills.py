"""kill -9 of the orchestrator while its pods run: nothing is lost, doubled or left, and the living are adopted."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS, RESOURCES
from openforgerl.types import Verdict

STORM = Path(__file__).with_name("storm.py")
LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")
GROUPS, CONCURRENCY = 30, 12


def load_storm() -> Any:
    spec = importlib.util.spec_from_file_location("storm", STORM)
    assert spec is not None and spec.loader is not None
    module = sys.modules["storm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


storm = load_storm()


def finished(folder: Path) -> dict[str, bytes]:
    """Every committed attempt as bytes; empty before there is a database."""
    file = folder / "run" / "run.sqlite"
    if not file.exists():
        return {}
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT attempt_id, record FROM attempts WHERE outcome IS NOT NULL").fetchall()
    except sqlite3.OperationalError as error:
        assert "no such table" in str(error)
        return {}
    finally:
        connection.close()
    return dict(rows)


async def life(folder: Path, kubeconfig: Path, *, until: int | None) -> int:
    """Run the orchestrator until it ends, or kill it once so many attempts are finished; its return code."""
    words = [sys.executable, str(STORM), str(folder), str(kubeconfig), str(GROUPS), str(CONCURRENCY)]
    log = (folder / "log").open("ab")
    process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log)
    log.close()
    ended = asyncio.create_task(process.wait())
    while not ended.done() and (until is None or len(finished(folder)) < until):
        await asyncio.wait([ended], timeout=0.05)
    if not ended.done():
        os.kill(process.pid, signal.SIGKILL)
    return await ended


@pytest.mark.parametrize(
    "kills", [pytest.param(3), pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_kills_of_the_orchestrator(tmp_path: Path, kills: int) -> None:
    pods = storm.StormPods(seconds=0.5)
    images = {"coroutine:*": Image(program=pods.program, handles_term=True)}
    nodes = [NodeSpec(name=f"node-{number}") for number in range(4)]
    options = ClusterOptions(nodes=nodes, namespaces=["rollouts"], clock=Clock(cluster=0.02), images=images)
    rng = random.Random(20)
    async with FakeCluster(options) as fake:
        fake.scenarios.at_random(0.1, seed=11)
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        kept: dict[str, bytes] = {}
        for number in range(kills):
            code = await life(tmp_path, kubeconfig, until=len(kept) + rng.randint(1, 100 // kills))
            assert code == -signal.SIGKILL, f"life {number} ended: {(tmp_path / 'log').read_text()[-3000:]}"
            now = finished(tmp_path)
            assert kept.items() <= now.items(), "a finished attempt changed or was lost"
            kept = now
        assert await life(tmp_path, kubeconfig, until=None) == 0, (tmp_path / "log").read_text()[-3000:]
        assert kept.items() <= finished(tmp_path).items()
        await pods.close()
        fake.restore_nodes()
        await fake.settled(60)
        assert [fake.objects.list(kind) for kind in (PODS, CONFIG_MAPS, LEASES)] == [[], [], []]
        assert fake.kubelet.lives == {}
        planted: dict[str, list[tuple[str, bool]]] = {}
        for one in fake.scenarios.planted.values():
            planted.setdefault(one.name, []).append((one.scenario.name, one.struck is not None))
    run_id, attempts = await storm.recorded(tmp_path)
    counts = storm.judged(run_id, attempts, planted)
    print(f"\n{kills} kills, {len(attempts)} attempts of {GROUPS * storm.GROUP} rollouts: {dict(counts)}")
    verdicts = Counter(attempt.rollout_id for attempt in attempts if isinstance(attempt.outcome, Verdict))
    assert len(verdicts) == GROUPS * storm.GROUP and set(verdicts.values()) == {1}
    assert len({attempt.attempt_id for attempt in attempts}) == len(attempts)
