"""A run on fakes: real store, real rollout room, fake sandboxes and a recorder of sessions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.orchestrator import Orchestrator, Recording, RunOptions, plan_rollouts
from openforgerl.rollout import RolloutOptions, Rooms
from openforgerl.store import Database, RunStore
from openforgerl.testing.fake_sandbox import FakeSandbox, FakeSandboxes
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    Ending,
    Exit,
    FinishReason,
    HarnessContext,
    JsonValue,
    Layer,
    Limits,
    Message,
    ModelCall,
    OpenedSession,
    Plan,
    Prompt,
    Role,
    Rollout,
    Sampling,
    SandboxRef,
    SandboxSpec,
    Source,
    Task,
    Text,
    ThreadRole,
    Trajectory,
    Verdict,
)

SECRET = "the-secret-of-one-attempt"


@dataclass
class FakeSessions:
    """Every session holds one complete call; remembers what was opened and sealed."""

    opened: list[str] = field(default_factory=list)
    seeds: dict[str, int | None] = field(default_factory=dict)
    sealed: list[str] = field(default_factory=list)
    status: CallStatus = CallStatus.COMPLETE

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: Limits,
        metadata: Mapping[str, str],
        template_kwargs: Mapping[str, JsonValue],
    ) -> OpenedSession:
        self.opened.append(session_id)
        self.seeds[session_id] = sampling.seed
        return OpenedSession(session_id=session_id, key=SECRET, base_urls={"chat": f"http://proxy:1/s/{session_id}/v1"})

    async def seal(self, session_id: str) -> None:
        self.sealed.append(session_id)

    async def calls(self, session_id: str) -> Sequence[ModelCall]:
        return [
            ModelCall(
                call_id=f"{session_id}-c0",
                session_id=session_id,
                index=0,
                dialect="chat",
                thread="t0",
                role=ThreadRole.MAIN,
                role_evidence="opens the session",
                parent_call_id=None,
                status=self.status,
                conversation=Conversation(messages=(Message(role=Role.USER, parts=(Text("go"),)),)),
                prompt=Prompt(ids=(1, 2, 3)),
                sampled_ids=(4, 5),
                logprobs=(-0.5, -0.25),
                weights_version=0,
                finish_reason=FinishReason.STOP,
                answer=Message(role=Role.ASSISTANT, parts=(Text("ok"),)),
                timing=CallTiming(received=time.time()),
                request_headers={"User-Agent": "fake/1"},
            )
        ]


class LastingSandboxes(FakeSandboxes):
    """A backend whose sandboxes outlive their process: `process_dies` is what a kill looks like from here."""

    dead = False

    def process_dies(self) -> None:
        """From now on nothing that this process still does reaches a sandbox."""
        self.dead = True

    @asynccontextmanager
    async def _created(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[FakeSandbox]:
        sandbox: FakeSandbox | None = None
        try:
            async with super()._created(spec, attempt_id) as sandbox:
                yield sandbox
        finally:
            if self.dead and sandbox is not None:
                self.live[attempt_id] = replace(sandbox, closed=False)

    @asynccontextmanager
    async def adopt(self, ref: SandboxRef, spec: SandboxSpec) -> AsyncGenerator[ClaimedSandbox]:
        del spec
        self.happened("adopt", ref.attempt_id)
        sandbox = self.live[ref.attempt_id]
        try:
            yield ClaimedSandbox(**{one.name: getattr(sandbox, one.name) for one in fields(sandbox)})
        finally:
            await self.live.pop(ref.attempt_id).close()

    async def reap_others(self, run_id: str, keep: Collection[str]) -> int:
        doomed = [ref.attempt_id for ref in await self.list(run_id) if ref.attempt_id not in keep]
        for attempt_id in doomed:
            await self.live.pop(attempt_id).close()
        return len(doomed)


@dataclass(slots=True)
class ClaimedSandbox(FakeSandbox):
    """Its program ended while nobody looked."""

    async def claim(self, key: str) -> Exit:
        if not self.programs:
            raise InputError("no such program")
        self.backend.happened("claim", self.attempt_id, key)
        self.files["/workspace/out.txt"] = b"done"
        return Exit(code=0)


class FakeHarness:
    """One program; exit code 0 is finished, 7 is the model's own doing, anything else a crash."""

    name = "fake"
    dialect = "chat"

    def layers(self) -> Sequence[Layer]:
        return ()

    def plan(self, context: HarnessContext) -> Plan:
        return Plan(argv=("agent", context.base_urls["chat"]), files={"/home/agent/key": context.key})

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        if exit.code == 0:
            return Ending(kind="finished", by_policy=False, evidence="exit 0")
        return Ending(kind="crashed", by_policy=exit.code == 7, evidence=f"exit {exit.code}")

    def report(self) -> Mapping[str, JsonValue]:
        return {"version": "1", "package_digest": "d"}


class RewardFromIndex:
    """Grades by the attempt's own name, so that tests know every reward: even index 1, odd 0."""

    scratch = ("/logs",)

    def __init__(self) -> None:
        self.faults: list[BaseException] = []

    async def verify(self, task: Task, sandbox: FakeSandbox, trajectory: Trajectory) -> Verdict:
        if self.faults:
            raise self.faults.pop(0)
        index = int(trajectory.attempt_id.rsplit("-", 2)[1])
        return Verdict(reward=float(index % 2 == 0), passed=index % 2 == 0)


@dataclass
class Bench:
    """Everything a test of the orchestrator turns and looks at."""

    folder: Path
    database: Database
    sessions: FakeSessions
    sandboxes: FakeSandboxes
    verifier: RewardFromIndex
    tasks: list[Task]

    @property
    def store(self) -> RunStore:
        return RunStore(self.database)

    def orchestrator(self, options: RunOptions | None = None, rollout: RolloutOptions | None = None) -> Orchestrator:
        rooms = Rooms(
            sessions=self.sessions,
            sandboxes=self.sandboxes,
            harnesses={"fake": FakeHarness()},
            verifier=self.verifier,
            spec=lambda task: SandboxSpec(run_id="run"),
            model="m",
            context_length=1024,
            options=rollout or RolloutOptions(),
            provenance={"config": "c" * 8},
            carry=self.folder,
        )
        return Orchestrator(
            rooms=rooms,
            store=self.store,
            tasks={task.name: task for task in self.tasks},
            options=options or RunOptions(),
            weights_version=lambda: 3,
        )

    def plan(self, per_task: int = 4) -> list[list[Rollout]]:
        return plan_rollouts(
            self.tasks, run_id="run", purpose="train", harness="fake", per_task=per_task, seed=0, step=1
        )

    async def run(self, orchestrator: Orchestrator, per_task: int = 4):
        recording = Recording(Source.POLICY, Sampling())
        return [result async for result in orchestrator.run(self.plan(per_task), recording)]
