"""One attempt of a row: the rollout room's own steps with the real harness, sandbox, proxy, store and verifier.

Only the model is scripted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.harnesses import observed_user_agents
from openforgerl.protocols import Harness
from openforgerl.proxy import InProcessSessions, ProxyOptions, ProxyServer
from openforgerl.rendering import ChatRenderer
from openforgerl.rollout import AttemptWork, RolloutOptions, Rooms, run_attempt
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.process import ProcessSandboxes
from openforgerl.store import CallStore, Database
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import (
    Attempt,
    Chunk,
    ModelCall,
    Prompt,
    Rollout,
    Sampling,
    SandboxLimits,
    SandboxSpec,
    Source,
    Task,
    Totals,
    Verdict,
)
from openforgerl.verifiers.script import ScriptVerifier

from .rows import Row
from .speech import Speech

LONG = 400_000
"""Tokens of context where a row asks for none; the tiny model's tokenizer makes three of what a large one makes one."""
PATIENCE = 540.0
"""Seconds of wall clock for a harness: a busy machine is slow, and no row is about that."""
TEST_SH = """\
cmp -s /workspace/b.txt /tests/wanted.txt && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Ran:
    """What came of an attempt."""

    attempt: Attempt
    calls: list[ModelCall]
    totals: Totals

    @property
    def ended(self) -> str:
        """`finished`, `gave_up`, ... for a graded attempt; `<origin> failure: <kind>` for a discarded one."""
        outcome = self.attempt.outcome
        if isinstance(outcome, Verdict):
            return outcome.ending
        assert outcome is not None
        return f"{outcome.origin.value} failure: {outcome.kind}"

    @property
    def passed(self) -> bool | None:
        """What the verifier says; None for a discarded attempt."""
        return self.attempt.outcome.passed if isinstance(self.attempt.outcome, Verdict) else None

    @property
    def threads(self) -> dict[str, int]:
        """Role → number of threads that have it."""
        named = {(call.role.value, call.thread) for call in self.calls}
        return dict(sorted(Counter(role for role, _ in named).items()))

    @property
    def user_agents(self) -> tuple[str, ...]:
        return observed_user_agents(self.calls)

    def told(self) -> str:
        """Everything, for whoever reads a failing test."""
        lines = [
            f"{call.index} {call.thread} {call.role.value} [{call.role_evidence[:90]}] {call.status.value} "
            f"{call.finish_reason} parent {call.parent_call_id} prompt {len(call.prompt.ids)} "
            f"sampled {len(call.sampled_ids)} {call.error or ''} {list(call.warnings)}"
            for call in self.calls
        ]
        harness = self.attempt.harness
        printed = [f"{name}: {str(harness.get(name, ''))[-2500:]}" for name in ("ending", "stdout", "stderr")]
        return "\n".join([f"{self.ended}, passed {self.passed}", *lines, str(self.totals), *printed])


class Narrowing(ScriptedEngine):
    """Its context is `room` tokens longer than the first prompt: whatever follows a long output does not fit."""

    room: int | None = None
    _first: int | None = None

    @property
    def context_length(self) -> int:
        return LONG if self.room is None or self._first is None else self._first + self.room

    async def generate(
        self, prompt: Prompt, sampling: Sampling, *, affinity: str, priority: int = 0, deadline: float | None = None
    ) -> AsyncIterator[Chunk]:
        self._first = self._first or len(prompt.ids)
        answer = super().generate(prompt, sampling, affinity=affinity, priority=priority, deadline=deadline)
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                yield chunk


def task_in(folder: Path) -> Task:
    """A task whose verifier looks for a copy of `a.txt`."""
    tests = folder / "task" / "tests"
    tests.mkdir(parents=True)
    (tests / "wanted.txt").write_text("hello\n")
    (tests / "test.sh").write_text(TEST_SH)
    (folder / "task" / "a.txt").write_text("hello\n")
    return Task(
        name="copy", digest="d", path=str(folder / "task"), instruction="Copy a.txt to b.txt.", agent_timeout=PATIENCE
    )


async def run_row(folder: Path, renderer: ChatRenderer, harness: Harness, row: Row, say: Speech) -> Ran:
    """Carry the row out once."""
    answers: list[dict[str, Any]] = row.says(say)
    engine = Narrowing(
        Script.decode(json.dumps({"answers": answers})), renderer, model_name="policy", context_length=LONG
    )
    engine.room = row.room
    task = task_in(folder)
    rollout = Rollout(
        rollout_id="r",
        run_id="conformance",
        task=task.name,
        task_digest=task.digest,
        harness=harness.name,
        group_id="g",
        index=0,
        seed=1,
        purpose="try",
    )
    work = AttemptWork(
        attempt=Attempt(attempt_id="r-a1", rollout_id="r", number=1, started_at=0.0),
        rollout=rollout,
        task=task,
        sampling=Sampling(),
    )
    options = ProxyOptions(control_token_file=str(folder / "control.token"))
    async with (
        Database.open(folder / "run.sqlite") as database,
        ProxyServer(engine=engine, renderer=renderer, store=CallStore(database), options=options) as proxy,
    ):
        endpoint = proxy.data_address

        def spec(task: Task) -> SandboxSpec:
            return SandboxSpec(
                run_id="conformance",
                files={"/workspace/a.txt": f"{task.path}/a.txt"},
                endpoint=endpoint,
                limits=SandboxLimits(memory_mb=4096),
            )

        rooms = Rooms(
            sessions=InProcessSessions(proxy),
            sandboxes=ProcessSandboxes(SandboxOptions(), folder / "state"),
            harness=harness,
            verifier=ScriptVerifier(),
            spec=spec,
            model="policy",
            context_length=row.told.get(harness.name, LONG),
            options=RolloutOptions(max_output_tokens=4000),
            carry=folder,
        )
        attempt = await run_attempt(work, rooms)
    calls = list(work.calls)
    samples = build_samples(build("r-a1", calls), rollout=rollout, source=Source.TEACHER, policy=SamplePolicy())
    return Ran(attempt, calls, samples.totals)
