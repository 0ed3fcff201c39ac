"""One attempt, from session to verdict. `execute` is the paragraph everyone should read."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit, urlunsplit

import msgspec

from openforgerl.errors import InputError, StageError, boundary
from openforgerl.protocols import AdoptedSandbox, AdoptingSandboxes, Harness, Sandbox, Sandboxes, Sessions, Verifier
from openforgerl.rollout.judging import OnTimeout, RolloutOptions, judge
from openforgerl.trajectory import build, count_breaks
from openforgerl.types import (
    Attempt,
    Exit,
    GradedHow,
    HarnessContext,
    JsonValue,
    Limits,
    ModelCall,
    OpenedSession,
    Origin,
    Outcome,
    Plan,
    Rollout,
    Sampling,
    SandboxRef,
    SandboxSpec,
    Stage,
    Task,
    Verdict,
)

log = logging.getLogger(__name__)

OURS = 120.0
"""Seconds that our own work in a stage may take, on a busy machine; past them it has stalled."""
PATIENCE = 10.0
"""Seconds that an agent's sandbox is kept for the case that we die, while the verifier's is waited for."""
AGENT = "agent"
"""By what the harness's program is found again in an adopted sandbox."""
OUTPUT_TAIL = 4000
"""Bytes of the harness's output kept in the record."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What an attempt is run with."""

    sessions: Sessions
    sandboxes: Sandboxes
    harnesses: Mapping[str, Harness]
    """By name, as rollouts name them."""
    verifier: Verifier
    spec: Callable[[Task], SandboxSpec]
    """The task's sandbox, without the harness's layers."""
    model: str
    context_length: int
    options: RolloutOptions
    provenance: Mapping[str, JsonValue]
    """What is the same for every attempt of the run."""
    carry: Path
    """Where an attempt's state waits between its two sandboxes. In the run folder, not in /tmp: what a killed process
    leaves there is found and removed by the next one."""


@dataclass(slots=True)
class AttemptWork:
    """What one attempt gathers on its way: timings, reports and calls, kept whatever happens."""

    attempt: Attempt
    rollout: Rollout
    task: Task
    sampling: Sampling
    note: Callable[[Attempt], Awaitable[None]] | None = None
    """Keeps the attempt as it stands once its sandbox is set up; None where no restart could go on with it."""
    adopt: SandboxRef | None = None
    """The sandbox, set up and at work, in which an earlier process began this attempt."""
    calls: Sequence[ModelCall] = ()
    sandbox: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    harness: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    provenance: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    timings: dict[str, float] = field(default_factory=dict[str, float])
    left_behind: list[str] = field(default_factory=list[str])
    """What could not be undone at the end."""
    at: Stage = Stage.SESSION
    """The stage reached."""

    @asynccontextmanager
    async def stage(self, stage: Stage, limit: float | None = None) -> AsyncGenerator[None]:
        """`boundary(stage)` that also adds up the seconds spent, and ends after `limit` of them: whatever is below
        has limits of its own, so past this one it has stalled."""
        started, self.at = time.monotonic(), stage
        try:
            with boundary(stage):
                async with _limited(stage, "stalled", limit):
                    yield
        finally:
            self.timings[stage.value] = self.timings.get(stage.value, 0.0) + time.monotonic() - started

    @asynccontextmanager
    async def leaving(self, stage: Stage) -> AsyncGenerator[None]:
        """Something is undone at the attempt's end. An error is recorded and logged, and changes no outcome: the
        outcome was settled before, and one attempt's remains must not end the run."""
        try:
            with boundary(stage):
                async with _limited(stage, "stalled", OURS):
                    yield
        except StageError as error:
            log.error("%s: leaving %s: %s", self.attempt.attempt_id, stage, error.message)
            self.left_behind.append(f"{stage}: {error.message}"[:2000])

    def gathered(self) -> Attempt:
        """The attempt with everything gathered so far."""
        return msgspec.structs.replace(
            self.attempt,
            sandbox=self.sandbox | ({"left_behind": list(self.left_behind)} if self.left_behind else {}),
            harness=self.harness,
            provenance=self.provenance,
            timings={name: round(seconds, 4) for name, seconds in self.timings.items()},
        )


async def run_attempt(work: AttemptWork, rooms: Rooms) -> Attempt:
    """Run one attempt to its outcome. A failure is data; only cancellation and exactness errors escape."""
    work.harness, work.provenance = dict(work.attempt.harness), dict(work.attempt.provenance)
    if work.adopt is None:
        work.provenance = {**rooms.provenance, "task": work.task.digest, "seed": work.sampling.seed}
    try:
        async with _limited(lambda: work.at, "attempt_timeout", rooms.options.attempt_timeout):
            outcome = await execute(work, rooms)
    except StageError as error:
        outcome = error.failure()
    if broken := count_breaks(work.calls):
        work.harness["prefix_breaks"] = broken
    return msgspec.structs.replace(work.gathered(), finished_at=time.time(), outcome=outcome)


async def execute(work: AttemptWork, rooms: Rooms) -> Outcome:
    """Session, sandbox, plan, harness, seal, kill, verify; each step inside its boundary."""
    async with AsyncExitStack() as stack:
        async with work.stage(Stage.SESSION, OURS):
            session = await stack.enter_async_context(_session(work, rooms))
        held = await stack.enter_async_context(AsyncExitStack())
        async with work.stage(Stage.SANDBOX, rooms.options.start_timeout):
            sandbox = await held.enter_async_context(_sandbox(work, rooms))
        async with work.stage(Stage.SETUP, rooms.options.start_timeout):
            plan = None if session is None else await _set_up(work, rooms, sandbox, session)
        async with work.stage(Stage.RUN, _timeout(work, rooms) + OURS):
            exit = await _run(work, rooms, sandbox, plan)
        async with work.stage(Stage.SEAL, OURS):
            await _sealed(work, rooms)
        async with work.stage(Stage.KILL, OURS):
            await sandbox.kill_agent()
        async with work.stage(Stage.RUN):
            ending = _judge(work, rooms, exit)
        async with work.stage(Stage.VERIFY, rooms.options.start_timeout + work.task.verifier_timeout + OURS):
            return await _grade(work, rooms, sandbox, ending, held.aclose)


@asynccontextmanager
async def _limited(stage: Stage | Callable[[], Stage], kind: str, limit: float | None) -> AsyncGenerator[None]:
    """At most `limit` seconds for this block. Raises StageError, of our making, past them."""
    timer = asyncio.timeout(limit)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        where = stage if isinstance(stage, Stage) else stage()
        origin = Origin.VERIFIER if where is Stage.VERIFY else Origin.INFRASTRUCTURE
        text = f"stage {where} was not over after {limit:g} s"
        raise StageError(where, kind, text, origin=origin, retryable=True) from error


@asynccontextmanager
async def _session(work: AttemptWork, rooms: Rooms) -> AsyncGenerator[OpenedSession | None]:
    """A session that is sealed however the attempt ends, so that its key is dead before anything else happens.

    None for that of an adopted attempt: it is open already, and the harness has its key.
    """
    options = rooms.options
    session = (
        None
        if work.adopt
        else await rooms.sessions.open(
            work.attempt.attempt_id,
            sampling=msgspec.structs.replace(work.sampling, max_tokens=options.max_output_tokens),
            limits=Limits(
                calls=options.calls, sampled_tokens=options.sampled_tokens, seconds=_timeout(work, rooms) + 30
            ),
            metadata={
                "rollout": work.rollout.rollout_id,
                "task": work.task.name,
                "run": work.rollout.run_id,
                "harness": work.rollout.harness,
            },
            template_kwargs={},
        )
    )
    try:
        yield session
    finally:
        # Shielded: a cancelled attempt must not leave a live key behind.
        async with work.leaving(Stage.SEAL):
            await asyncio.shield(_sealed(work, rooms))


async def _sealed(work: AttemptWork, rooms: Rooms) -> None:
    await rooms.sessions.seal(work.attempt.attempt_id)
    if not work.calls:
        work.calls = await rooms.sessions.calls(work.attempt.attempt_id)


@asynccontextmanager
async def _sandbox(work: AttemptWork, rooms: Rooms) -> AsyncGenerator[Sandbox]:
    spec = rooms.spec(work.task)
    spec = msgspec.structs.replace(spec, layers=(*spec.layers, *_harness(work, rooms).layers()))
    async with _removed(work, _created(work, rooms, spec)) as sandbox:
        work.sandbox = {"ref": msgspec.to_builtins(sandbox.ref), **sandbox.report}
        yield sandbox


@asynccontextmanager
async def _removed(
    work: AttemptWork,
    creation: AbstractAsyncContextManager[Sandbox],
    release: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Sandbox]:
    """The sandbox of `creation`, whose removal changes no outcome: what stays of it is the reaper's.

    `release`: makes room for it, and is called when it does not come about by itself.
    """
    if release is None:
        sandbox = await creation.__aenter__()
    else:
        async with _making_room(release):
            sandbox = await creation.__aenter__()
    try:
        yield sandbox
    finally:
        async with work.leaving(Stage.SANDBOX):
            await creation.__aexit__(None, None, None)


@asynccontextmanager
async def _making_room(release: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Call `release` when this block takes long: attempts that hold all room and wait for more would wait for ever."""
    over = asyncio.Event()

    async def watch() -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await over.wait()
        except TimeoutError:
            await release()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        over.set()
        await asyncio.shield(watching)


def _created(work: AttemptWork, rooms: Rooms, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
    if work.adopt is None:
        return rooms.sandboxes.create(spec, work.attempt.attempt_id)
    if not isinstance(rooms.sandboxes, AdoptingSandboxes):
        raise InputError(f"this backend cannot go on with the sandbox of {work.attempt.attempt_id}")
    return rooms.sandboxes.adopt(work.adopt, spec)


def _context(work: AttemptWork, rooms: Rooms, session: OpenedSession) -> HarnessContext:
    spec = rooms.spec(work.task)
    return HarnessContext(
        task=work.task,
        rollout=work.rollout,
        base_urls={name: _inside(url, spec) for name, url in session.base_urls.items()},
        key=session.key,
        model=rooms.model,
        context_length=rooms.context_length,
        max_output_tokens=rooms.options.max_output_tokens,
        home=spec.home,
        workdir=spec.workdir,
    )


def _inside(url: str, spec: SandboxSpec) -> str:
    """A base URL as the agent reaches it: mostly by a port of the sandbox's own loopback that leads to the proxy."""
    parts = urlsplit(url)
    host = f"[{spec.endpoint_host}]" if ":" in spec.endpoint_host else spec.endpoint_host
    return urlunsplit(("http", f"{host}:{spec.endpoint_port}", parts.path, parts.query, ""))


async def _set_up(work: AttemptWork, rooms: Rooms, sandbox: Sandbox, session: OpenedSession) -> Plan:
    plan = _harness(work, rooms).plan(_context(work, rooms, session))
    told = {"model": rooms.model, "context_length": rooms.context_length}
    harness = _harness(work, rooms)
    work.harness = {**harness.report(), **told, "name": harness.name, "argv": list(plan.argv)}
    for path, text in plan.files.items():
        await sandbox.write(path, text.encode())
    if work.note is not None:
        await work.note(work.gathered())
    return plan


async def _run(work: AttemptWork, rooms: Rooms, sandbox: Sandbox, plan: Plan | None) -> Exit:
    """Run the plan to its end, or wait for the end of one that an earlier process began."""
    if plan is None:
        exit = await _claimed(cast(AdoptedSandbox, sandbox))
    else:
        exit = await _execute(plan, sandbox, _timeout(work, rooms))
    work.harness |= {
        "exit": exit.code,
        "signal": exit.signal,
        "timed_out": exit.timed_out,
        "seconds": round(exit.seconds, 3),
        "stdout": exit.stdout[-OUTPUT_TAIL:].decode("utf-8", errors="replace"),
        "stderr": exit.stderr[-OUTPUT_TAIL:].decode("utf-8", errors="replace"),
    }
    return exit


async def _execute(plan: Plan, sandbox: Sandbox, timeout: float) -> Exit:
    services = [asyncio.create_task(sandbox.exec(argv, env=plan.env, timeout=timeout)) for argv in plan.services]
    try:
        return await sandbox.exec(plan.argv, env=plan.env, stdin=plan.stdin.encode(), timeout=timeout, key=AGENT)
    finally:
        for service in services:
            service.cancel()  # their processes die with the agent's, in `kill_agent`
        await asyncio.gather(*services, return_exceptions=True)


async def _claimed(sandbox: AdoptedSandbox) -> Exit:
    try:
        return await sandbox.claim(AGENT)
    except InputError as error:  # the process that made the sandbox died between setting it up and this
        text = f"the harness was never started in the adopted sandbox: {error}"
        raise StageError(Stage.RUN, "not_started", text, origin=Origin.INFRASTRUCTURE, retryable=True) from error


def _judge(work: AttemptWork, rooms: Rooms, exit: Exit) -> str:
    work.harness["user_agents"] = sorted({_user_agent(call.request_headers) for call in work.calls} - {""})
    ending = _harness(work, rooms).ending(exit, work.calls)
    work.harness["ending"] = msgspec.to_builtins(ending)
    return judge(exit, ending, work.calls, rooms.options.on_timeout)


async def _grade(
    work: AttemptWork, rooms: Rooms, sandbox: Sandbox, ending: str, release: Callable[[], Awaitable[None]]
) -> Verdict:
    """Grade the state as left in a fresh sandbox, to which only declared paths are carried, as data.

    `release` gives the agent's sandbox up. Until then a killed orchestrator can go on with the attempt.
    """
    task, options = work.task, rooms.options
    if ending == "limit:time" and options.on_timeout is OnTimeout.ZERO:
        return _lowest(task, ending)
    spec = rooms.spec(task)
    with tempfile.TemporaryDirectory(dir=rooms.carry) as name:
        carried = Path(name)
        paths = [spec.workdir, *task.artifacts]
        limit = options.export_mb * 2**20
        try:
            await sandbox.export(paths, carried, limit=limit)
        except StageError as error:
            if error.origin is not Origin.POLICY or _bytes_of(spec.files.values()) > limit:
                raise
            # What the policy left cannot be carried to a verifier. Discarding it would let it choose not to be graded.
            return _lowest(task, "limit:state", export=error.message)
        work.sandbox |= sandbox.report  # what an export could not carry
        files = {path: str(carried / path.lstrip("/")) for path in paths if (carried / path.lstrip("/")).exists()}
        # Nothing of the agent's surroundings but the declared files: no network, no variables, fresh directories.
        fresh_spec = msgspec.structs.replace(spec, files=files, endpoint=None, env={}, scratch=rooms.verifier.scratch)
        creation = rooms.sandboxes.create(fresh_spec, f"{work.attempt.attempt_id}-verify")
        async with _removed(work, creation, release) as fresh:
            verdict = await rooms.verifier.verify(task, fresh, build(work.attempt.attempt_id, work.calls))
    return msgspec.structs.replace(verdict, ending=ending)


def _lowest(task: Task, ending: str, **evidence: str) -> Verdict:
    low, _ = task.reward_range
    return Verdict(
        reward=low,
        passed=False,
        reward_range=task.reward_range,
        evidence=evidence,
        graded=GradedHow.ASSIGNED,
        ending=ending,
    )


def _bytes_of(paths: Iterable[str]) -> int:
    """Size of host files and trees: what a task itself brings."""
    trees = [Path(path) for path in paths]
    files = [file for tree in trees for file in ([tree] if tree.is_file() else tree.rglob("*"))]
    return sum(file.lstat().st_size for file in files if file.is_file())


def _harness(work: AttemptWork, rooms: Rooms) -> Harness:
    return rooms.harnesses[work.rollout.harness]


def _timeout(work: AttemptWork, rooms: Rooms) -> float:
    return rooms.options.agent_timeout or work.task.agent_timeout


def _user_agent(headers: Mapping[str, str]) -> str:
    return next((value for name, value in headers.items() if name.lower() == "user-agent"), "")
