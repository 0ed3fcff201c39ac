"""kill -9 of the orchestrator while its pods run: nothing is lost, doubled or left, and the living are adopted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS, RESOURCES
from openforgerl.types import Attempt, Failure, Verdict

from .storming import STORM, storm

LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")


GROUP: int = storm.GROUP


@dataclass(frozen=True, slots=True)
class Moment:
    """When an orchestrator is killed: once `finished` attempts are finished, or `seconds` after its start."""

    finished: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """`groups` of GROUP rollouts, so many at once; and how often the orchestrator is killed meanwhile."""

    groups: int
    concurrency: int
    kills: int

    @property
    def rollouts(self) -> int:
        return self.groups * GROUP

    def moments(self, rng: random.Random) -> Iterator[tuple[str, float]]:
        """For each kill, how many more attempts must be finished; every fourth comes after some seconds instead,
        when the orchestrator is starting or still adopts what it found."""
        for number in range(self.kills):
            if number % 4 == 3:
                yield "seconds", rng.uniform(0.5, 8.0)
            else:
                yield "finished", rng.randint(1, round(1.6 * self.rollouts / self.kills))


SMALL, WHOLE = Size(groups=30, concurrency=12, kills=4), Size(groups=500, concurrency=500, kills=20)


def query(folder: Path, what: str) -> list[Any]:
    """Rows of the attempts that have an outcome; none before there is a database."""
    file = folder / "run" / "run.sqlite"
    if not file.exists():
        return []
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return connection.execute(f"SELECT {what} FROM attempts WHERE outcome IS NOT NULL").fetchall()
    except sqlite3.OperationalError as error:
        assert "no such table" in str(error)
        return []
    finally:
        connection.close()


def finished(folder: Path) -> dict[str, bytes]:
    """Every committed attempt as bytes."""
    return dict(query(folder, "attempt_id, record"))


async def life(folder: Path, kubeconfig: Path, size: Size, moment: Moment) -> int:
    """Run the orchestrator until it ends or is killed; its return code."""
    words = [sys.executable, str(STORM), str(folder), str(kubeconfig), str(size.groups), str(size.concurrency)]
    log = (folder / "log").open("ab")
    process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log)
    log.close()
    begun = time.monotonic()

    def due() -> bool:
        if moment.seconds is not None:
            return time.monotonic() - begun >= moment.seconds
        return moment.finished is not None and sum(row[0] for row in query(folder, "count(*)")) >= moment.finished

    ended = asyncio.create_task(process.wait())
    while not ended.done() and not due():
        await asyncio.wait([ended], timeout=0.1)
    if not ended.done():
        os.kill(process.pid, signal.SIGKILL)
    return await ended


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(WHOLE, id="whole", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_kills_of_the_orchestrator(tmp_path: Path, size: Size) -> None:
    pods = storm.StormPods(seconds=0.5)
    images = {"coroutine:*": Image(program=pods.program, handles_term=True)}
    nodes = [NodeSpec(name=f"node-{number}") for number in range(16)]
    options = ClusterOptions(nodes=nodes, namespaces=["rollouts"], clock=Clock(cluster=0.02), images=images)
    begun = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeCluster(options))
        stack.push_async_callback(pods.close)
        fake.scenarios.at_random(0.1, seed=11)
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        kept: dict[str, bytes] = {}
        for number, (kind, amount) in enumerate(size.moments(random.Random(20))):
            counted = Moment(finished=len(kept) + int(amount))
            moment = counted if kind == "finished" else Moment(seconds=amount)
            code = await life(tmp_path, kubeconfig, size, moment)
            assert code == -signal.SIGKILL, f"life {number} ended: {(tmp_path / 'log').read_text()[-3000:]}"
            now = finished(tmp_path)
            assert kept.items() <= now.items(), "a finished attempt changed or was lost"
            living = len(fake.kubelet.lives)
            print(
                f"kill {number + 1}, {time.monotonic() - begun:.0f} s: {len(now)} attempts finished, {living} pods live"
            )
            kept = now
        assert await life(tmp_path, kubeconfig, size, Moment()) == 0, (tmp_path / "log").read_text()[-3000:]
        assert kept.items() <= finished(tmp_path).items()
        seconds = time.monotonic() - begun
        fake.restore_nodes()
        await fake.settled(60)
        assert [fake.objects.list(kind) for kind in (PODS, CONFIG_MAPS, LEASES)] == [[], [], []]
        assert fake.kubelet.lives == {}
        planted: dict[str, list[tuple[str, bool]]] = {}
        for one in fake.scenarios.planted.values():
            planted.setdefault(one.name, []).append((one.scenario.name, one.struck is not None))
    run_id, attempts = await storm.recorded(tmp_path)
    counts = storm.judged(run_id, attempts, planted, unseen=storm.UNSEEN)
    calls = sum(fake.counts.calls.values()) / size.rollouts
    print(f"{size.kills} kills, {len(attempts)} attempts of {size.rollouts} rollouts, {seconds:.0f} s: {dict(counts)}")
    print(f"API calls: {calls:.2f} a rollout; {dict(fake.counts.calls)}")
    assert len({attempt.attempt_id for attempt in attempts}) == len(attempts)
    dropped = [group for group in grouped(attempts) if not whole(group)]
    print(f"groups dropped by chance: {len(dropped)}")
    assert len(dropped) <= size.groups / 100
    for group in dropped:  # by faults that were planted, not by kills
        assert sum(isinstance(one.outcome, Failure) and one.outcome.kind not in storm.KILLED for one in group) > GROUP


def grouped(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """The attempts of each group."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.rollout_id.rpartition("-")[0], []).append(attempt)
    return list(groups.values())


def whole(group: Sequence[Attempt]) -> bool:
    """Whether each rollout has its verdict; none has two, and nothing comes after it."""
    last = {attempt.rollout_id: attempt for attempt in sorted(group, key=lambda one: one.number)}
    assert len(last) == GROUP and all(attempt.outcome is not None for attempt in group)
    verdicts = [attempt for attempt in group if isinstance(attempt.outcome, Verdict)]
    assert all(last[attempt.rollout_id] is attempt for attempt in verdicts)
    return len(verdicts) == GROUP
