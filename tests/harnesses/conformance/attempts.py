"""One attempt of a row: the rollout room's own steps with the real harness, sandbox, proxy, store and verifier.

Only the model is scripted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.errors import EngineError
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

from .line import Line
from .rows import PICTURE, Row
from .speech import Speech

LONG = 400_000
"""Tokens of context where a row asks for none; the tiny model's tokenizer makes three of what a large one makes one."""
PATIENCE = 540.0
"""Seconds of wall clock for a harness: a busy machine is slow, and no row is about that."""
READING = 2.0
"""Seconds that a client has to read what was said before the connection closes."""
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
    def pictures(self) -> int:
        return max((len(call.prompt.images) for call in self.calls), default=0)

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
        printed = [f"{name}: {str(harness.get(name, ''))[-2500:]}" for name in ("ending", "exit", "stdout", "stderr")]
        return "\n".join(
            [f"{self.ended}, passed {self.passed}", str(self.attempt.outcome), *lines, str(self.totals), *printed]
        )


class Staged(ScriptedEngine):
    """A script on the stage that a row sets: how long the context is, and what a cut looks like from outside."""

    room: int | None = None
    """The context is so many tokens longer than the first prompt: whatever follows a long output does not fit."""
    hang_up: Callable[[], None] | None = None
    """Closes the client's connection: a cut is that, not an error of the engine's."""
    _first: int | None = None

    @property
    def context_length(self) -> int:
        return LONG if self.room is None or self._first is None else self._first + self.room

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        self._first = self._first or len(prompt.ids)
        answer = super().generate(
            prompt, sampling, affinity=affinity, priority=priority, deadline=deadline, images=images
        )
        async with aclosing(answer) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except EngineError:
                if self.hang_up is None:
                    raise
                await asyncio.sleep(READING)
                self.hang_up()
                await asyncio.Event().wait()  # until the proxy sees that its client is gone


def task_in(folder: Path) -> Task:
    """A task whose verifier looks for a copy of `a.txt`."""
    tests = folder / "task" / "tests"
    tests.mkdir(parents=True)
    (tests / "wanted.txt").write_text("hello\n")
    (tests / "test.sh").write_text(TEST_SH)
    (folder / "task" / "a.txt").write_text("hello\n")
    Image.new("RGB", (96, 64), "red").save(folder / "task" / "red.png")
    return Task(
        name="copy", digest="d", path=str(folder / "task"), instruction="Copy a.txt to b.txt.", agent_timeout=PATIENCE
    )


async def run_row(folder: Path, renderer: ChatRenderer, harness: Harness, row: Row, say: Speech) -> Ran:
    """Carry the row out once."""
    answers: list[dict[str, Any]] = row.says(say)
    engine = Staged(Script.decode(json.dumps({"answers": answers})), renderer, model_name="policy", context_length=LONG)
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
        Line(proxy.data_address) as line,
    ):
        if row.drops:
            engine.hang_up = line.hang_up
        files = {"/workspace/a.txt": "a.txt", **({PICTURE: "red.png"} if row.pictures else {})}

        def spec(task: Task) -> SandboxSpec:
            return SandboxSpec(
                run_id="conformance",
                files={inside: f"{task.path}/{name}" for inside, name in files.items()},
                endpoint=line.address,
                limits=SandboxLimits(memory_mb=4096),
            )

        rooms = Rooms(
            sessions=InProcessSessions(proxy),
            sandboxes=ProcessSandboxes(SandboxOptions(), folder / "state"),
            harnesses={harness.name: harness},
            verifier=ScriptVerifier(),
            spec=spec,
            model="policy",
            context_length=row.told.get(harness.name, LONG),
            options=RolloutOptions(max_output_tokens=4000),
            provenance={},
            carry=folder,
        )
        attempt = await run_attempt(work, rooms)
    calls = list(work.calls)
    samples = build_samples(build("r-a1", calls), rollout=rollout, source=Source.TEACHER, policy=SamplePolicy())
    return Ran(attempt, calls, samples.totals)
