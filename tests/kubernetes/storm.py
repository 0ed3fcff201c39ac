"""Many rollouts on a fake cluster full of faults: the whole stack of a run, with pods that are coroutines.

`python storm.py FOLDER KUBECONFIG GROUPS CONCURRENCY` is one life of the orchestrator, for tests that kill it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from openforgerl.config import RoomsConfig, load_config
from openforgerl.engines.script import Answer, Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.orchestrator import Recording, RunOptions, plan_rollouts
from openforgerl.orchestrator.assembly import open_house, open_run
from openforgerl.rendering import load_renderer
from openforgerl.sandboxes.kubernetes.names import pod_name
from openforgerl.store import Database, RunStore
from openforgerl.tasks import read_tasks
from openforgerl.testing.fake_init import FakePod
from openforgerl.testing.fake_kubernetes import SCENARIOS, ProgramContext
from openforgerl.testing.fake_sandbox import Program
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import (
    Attempt,
    Ending,
    Exit,
    Failure,
    HarnessContext,
    JsonValue,
    Layer,
    ModelCall,
    Plan,
    Sampling,
    Source,
    Verdict,
)

GROUP = 4
TASKS = 10

EXPECTED: Mapping[str, frozenset[str]] = {
    "exit-3": frozenset({"init_ended"}),
    "oom": frozenset({"oom"}),
    "deadline": frozenset({"deadline"}),
    "image-missing": frozenset({"image_pull"}),
    "image-never": frozenset({"image_absent"}),
    "unschedulable": frozenset({"unschedulable"}),
    "evicted": frozenset({"disk_limit"}),
    "start-error": frozenset({"start_error"}),
    "node-lost": frozenset({"node_lost"}),
}
"""Scenario → what an attempt that it breaks must be called. The others break nothing."""
UNSEEN: Mapping[str, frozenset[str]] = {"oom-child": frozenset({"oom"})}
"""The same of an attempt whose pod ended while there was no orchestrator: the next finds only what the pod shows."""
NEVER_RUN = frozenset({"image-missing", "image-never", "unschedulable", "start-error"})
"""No attempt with such a pod can have a verdict."""
KILLED = frozenset({"interrupted", "not_started", "not_adopted"})
"""What an attempt is called whose orchestrator was killed before its sandbox could be taken over."""


class StormHarness:
    """A client of the proxy that is a coroutine in its pod."""

    name = "storm"
    dialect = "chat"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        del options

    def layers(self) -> Sequence[Layer]:
        return ()

    def plan(self, context: HarnessContext) -> Plan:
        return Plan(argv=("agent", context.base_urls["chat"], context.key))

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        finished = exit.code == 0 and len(calls) > 0
        return Ending(kind="finished" if finished else "crashed", by_policy=False, evidence=f"exit {exit.code}")

    def report(self) -> Mapping[str, JsonValue]:
        return {"version": "1"}


class StormPods:
    """Plays every program of a run: the agent asks the model and writes its answer down, the verifier's reads it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def program(self, context: ProgramContext) -> int:
        """One pod."""
        return await FakePod(self.play).run(context)

    async def play(self, pod: FakePod, program: Program) -> Exit:
        """One program."""
        if program.argv[0] == "agent":
            await asyncio.sleep(random.uniform(0.0, 2 * self._seconds))
            answer = await self._ask(program.argv[1], program.argv[2])
            pod.files["/workspace/out.txt"] = (answer.encode(), 0o644)
        elif program.argv[-1].endswith("test.sh"):
            right = pod.files.get("/workspace/out.txt", (b"", 0))[0] == b"Done."
            pod.files["/logs/verifier/reward.txt"] = (b"1" if right else b"0", 0o644)
        return Exit(code=0)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, base_url: str, key: str) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = {"model": "scripted", "messages": [{"role": "user", "content": "go"}]}
        headers = {"Authorization": f"Bearer {key}"}
        while True:  # as harnesses do: the proxy may be down for a moment
            try:
                async with self._session.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
                    said: dict[str, Any] = await response.json()
                if response.status < 500:
                    return str(said["choices"][0]["message"]["content"])
            except aiohttp.ClientError as error:
                logging.getLogger(__name__).debug("again: %s", error)
            await asyncio.sleep(0.5)


def write_tasks(folder: Path) -> Path:
    """Harbor tasks that need no files."""
    for number in range(TASKS):
        task = folder / f"task-{number:02}"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "instruction.md").write_text("Say Done.")
        (task / "task.toml").write_text(f'schema_version = "1.0"\n[task]\nname = "storm/task-{number:02}"\n')
        (task / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /workspace\n")
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


def make_config(kubeconfig: Path, concurrency: int) -> tuple[RoomsConfig, RunOptions]:
    """The rooms' config and the run's."""
    module = f"{__name__}:StormHarness" if __name__ != "__main__" else "storm:StormHarness"
    settings: dict[str, Any] = {
        "kubeconfig": str(kubeconfig),
        "image": "coroutine:1",
        "schedule_timeout": 4.0 + concurrency / 20,
        "pull_timeout": 4.0,
        "start_timeout": 60.0,
        "lost_node_timeout": 1.0,
        "grace": 1,
        "start_rate": 200.0,
        "start_burst": 100,
    }
    base = {
        "backend": "kubernetes",
        "harness": {"name": module},
        "sandbox": {"kubernetes": settings, "kill_timeout": 60.0},
        "rollout": {"agent_timeout": 600.0},
    }
    return load_config(RoomsConfig, None, (), base=base), RunOptions(concurrency=concurrency, stop_after=None)


async def live(folder: Path, kubeconfig: Path, groups: int, concurrency: int) -> list[Attempt]:
    """Run (or go on with) `groups` groups of GROUP rollouts; the last attempt of each rollout."""
    tasks = read_tasks(folder / "tasks" if (folder / "tasks").exists() else write_tasks(folder / "tasks"))
    tiny = folder / "tiny" if (folder / "tiny").exists() else write_tiny_model(folder / "tiny")
    config, run = make_config(kubeconfig, concurrency)
    renderer = load_renderer(tiny)
    engine = ScriptedEngine(Script(answers=(Answer(text="Done."),)), renderer)
    async with open_run(folder / "run", config) as opened:
        planned = [
            group
            for step in range(-(-groups // TASKS))
            for group in plan_rollouts(
                tasks,
                run_id=opened.run_id,
                purpose="train",
                harness=config.harness.name,
                per_task=GROUP,
                seed=0,
                step=step,
            )
        ][:groups]
        async with open_house(
            opened,
            config,
            run,
            engine=engine,
            renderer=renderer,
            tasks={task.name: task for task in tasks},
            on_attempt=lambda rollout, attempt: None,
        ) as house:
            recording = Recording(Source.TEACHER, Sampling())
            results = [result async for result in house.orchestrator.run(planned, recording)]
    return [attempt for result in results for attempt in result.attempts]


async def recorded(folder: Path) -> tuple[str, list[Attempt]]:
    """The run's id and all its attempts."""
    database = Database.read_only(folder / "run" / "run.sqlite")
    attempts = list(await RunStore(database).attempts())
    await database.close()
    return "run-" + hashlib.sha256(str((folder / "run").resolve()).encode()).hexdigest()[:12], attempts


def judged(
    run_id: str,
    attempts: Sequence[Attempt],
    planted: Mapping[str, Sequence[tuple[str, bool]]],
    *,
    unseen: Mapping[str, frozenset[str]] | None = None,
) -> Counter[str]:
    """Compare every attempt with the oracle; the count of each outcome. AssertionError names what is classified wrong.

    `planted`: pod name → (scenario, has struck) of each pod of that name. `unseen`: what else breaks an attempt.
    """
    breaks = {name: EXPECTED.get(name, frozenset()) | (unseen or {}).get(name, frozenset()) for name in SCENARIOS}
    counts: Counter[str] = Counter()
    for attempt in attempts:
        pods = [pod_name(run_id, attempt.attempt_id + end) for end in ("", "-verify")]
        given = [one for pod in pods for one in planted.get(pod, ())]
        outcome = attempt.outcome
        if isinstance(outcome, Verdict):
            assert outcome.reward == 1.0, attempt
            assert not any(scenario in NEVER_RUN for scenario, _ in given), (attempt.attempt_id, given)
            counts["verdict"] += 1
            continue
        assert isinstance(outcome, Failure), attempt
        counts[outcome.kind] += 1
        if outcome.kind in KILLED:
            continue
        allowed = {kind for scenario, _ in given for kind in breaks[scenario]}
        assert outcome.kind in allowed, (attempt.attempt_id, outcome, given)
        assert outcome.retryable, outcome
    return counts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    done = asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    print(json.dumps({"attempts": len(done)}))
