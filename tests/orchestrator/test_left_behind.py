"""What outlives its process or its attempt: sandboxes that are adopted, or cannot be removed, and open sessions."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from openforgerl.errors import StoreError
from openforgerl.orchestrator import Recording, RunOptions
from openforgerl.testing.fake_sandbox import FakeSandbox, Program
from openforgerl.types import (
    Attempt,
    Exit,
    Failure,
    Origin,
    Sampling,
    SandboxSpec,
    Source,
    Verdict,
)

from .bench import Bench, FakeSessions, LastingSandboxes


async def test_an_attempt_whose_sandbox_lives_on_is_finished_in_it(bench: Bench) -> None:
    """The process dies with one harness at work, and one sandbox being set up."""
    lasting = LastingSandboxes()
    bench = dataclasses.replace(bench, sandboxes=lasting, tasks=bench.tasks[:1])
    begun = asyncio.Event()

    async def work(sandbox: FakeSandbox, program: Program) -> Exit:
        if sandbox.attempt_id.endswith("-0-a0"):
            begun.set()
        await asyncio.sleep(3600)
        return Exit(code=0)

    async def slow_write(self: FakeSandbox, path: str, data: bytes, *, mode: int = 0o644) -> None:
        if self.attempt_id.endswith("-1-a0"):
            await begun.wait()
            both.set()
            await asyncio.sleep(3600)

    both = asyncio.Event()
    lasting.behaviour = work
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSandbox, "write", slow_write)
        first = asyncio.create_task(bench.run(bench.orchestrator(RunOptions(concurrency=2)), per_task=2))
        await both.wait()
        lasting.process_dies()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    lasting.dead = False
    names = {attempt.attempt_id for attempt in await bench.store.unfinished()}
    assert set(lasting.live) == names and len(names) == 2
    opened = list(bench.sessions.opened)

    async def ends(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=0)

    lasting.behaviour = ends
    orchestrator = bench.orchestrator()
    assert await orchestrator.reconcile("run") == 1  # the one that was not set up yet
    (result,) = await bench.run(orchestrator, per_task=2)
    at_work, set_up = (f"train-1-a-84fd-{index}-a0" for index in (0, 1))
    assert [attempt.attempt_id for attempt in result.attempts] == [at_work, set_up[:-1] + "1"]
    assert all(isinstance(attempt.outcome, Verdict) for attempt in result.attempts)
    assert result.attempts[0].harness["argv"] == ["agent", f"http://127.0.0.1:8080/s/{at_work}/v1"]
    assert result.attempts[0].provenance["task"] == "a" * 64
    assert [event.attempt_id for event in lasting.events if event.verb == "claim"] == [at_work]
    assert bench.sessions.opened == [*opened, set_up[:-1] + "1"]  # the adopted one kept its session
    assert lasting.live == {} and result.refills == 0


async def test_a_harness_that_was_never_started_in_its_sandbox_is_made_anew_at_no_refill(bench: Bench) -> None:
    lasting = LastingSandboxes()
    bench = dataclasses.replace(bench, sandboxes=lasting, tasks=bench.tasks[:1])
    attempt = Attempt(
        attempt_id="train-1-a-84fd-0-a0",
        rollout_id="train-1-a-84fd-0",
        number=0,
        started_at=0.0,
        sandbox={"backend": "fake"},
    )
    await bench.store.plan([rollout for group in bench.plan(1)[:1] for rollout in group])
    await bench.store.begin_attempt(attempt)
    lasting.live[attempt.attempt_id] = FakeSandbox(lasting, SandboxSpec(run_id="run"), attempt.attempt_id)
    orchestrator = bench.orchestrator()
    assert await orchestrator.reconcile("run") == 0
    (result,) = await bench.run(orchestrator, per_task=1)
    first, second = await bench.store.attempts()
    assert isinstance(first.outcome, Failure)
    assert (first.outcome.kind, first.outcome.origin) == ("not_started", Origin.INFRASTRUCTURE)
    assert isinstance(second.outcome, Verdict) and result.refills == 0 and lasting.live == {}


@pytest.mark.parametrize("which", ["a0", "verify"])
async def test_a_removal_that_fails_changes_no_outcome_and_ends_no_run(bench: Bench, which: str) -> None:
    """Neither an error of the backend nor one that only its close raises may touch a settled verdict."""
    attempt = f"train-1-a-84fd-0-a0{'' if which == 'a0' else '-verify'}"
    bench.sandboxes.plant("close", StoreError("its processes will not die"), attempt=attempt)
    results = await bench.run(bench.orchestrator())
    assert not any(result.dropped for result in results) and sum(result.refills for result in results) == 0
    found = {one.attempt_id: one for one in await bench.store.attempts()}
    assert len(found) == 8 and all(isinstance(one.outcome, Verdict) for one in found.values())
    (left,) = found["train-1-a-84fd-0-a0"].sandbox["left_behind"]  # type: ignore[misc]
    assert "its processes will not die" in str(left)
    assert sum("left_behind" in one.sandbox for one in found.values()) == 1


async def test_a_seal_that_fails_at_the_end_changes_no_outcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seal, sealed = FakeSessions.seal, list[str]()

    async def breaks_the_second_time(self: FakeSessions, session_id: str) -> None:
        sealed.append(session_id)
        if sealed.count(session_id) == 2:
            raise ConnectionError("the proxy is gone")
        await seal(self, session_id)

    monkeypatch.setattr(FakeSessions, "seal", breaks_the_second_time)
    await bench.run(bench.orchestrator(), per_task=1)
    attempts = await bench.store.attempts()
    assert len(attempts) == 2 and all(isinstance(one.outcome, Verdict) for one in attempts)
    assert all("the proxy is gone" in str(one.sandbox["left_behind"]) for one in attempts)


async def test_the_session_of_an_interrupted_attempt_is_sealed(bench: Bench) -> None:
    """Its key would live on, with whatever lives of its agent."""
    await bench.store.plan([rollout for group in bench.plan(1) for rollout in group])
    for rollout in await bench.store.rollouts():
        await bench.store.begin_attempt(
            Attempt(attempt_id=f"{rollout.rollout_id}-a0", rollout_id=rollout.rollout_id, number=0, started_at=0.0)
        )
    assert await bench.orchestrator().reconcile("run") == 2
    assert sorted(bench.sessions.sealed) == sorted(f"{one.rollout_id}-a0" for one in await bench.store.rollouts())


async def test_an_adopted_attempt_waits_for_no_place(bench: Bench) -> None:
    """It is at work already: what a rate or a full engine holds back is the start of others."""
    lasting = LastingSandboxes()
    bench = dataclasses.replace(bench, sandboxes=lasting, tasks=bench.tasks[:1])
    await bench.store.plan([rollout for group in bench.plan(3) for rollout in group])
    for index in range(3):
        attempt = Attempt(
            attempt_id=f"train-1-a-84fd-{index}-a0",
            rollout_id=f"train-1-a-84fd-{index}",
            number=0,
            started_at=0.0,
            sandbox={"backend": "fake"},
        )
        await bench.store.begin_attempt(attempt)
        lives = FakeSandbox(lasting, SandboxSpec(run_id="run"), attempt.attempt_id)
        lives.programs.append(Program((), {}, b"", 1.0))
        lasting.live[attempt.attempt_id] = lives
    orchestrator = bench.orchestrator(RunOptions(concurrency=1, starts_per_second=0.001))
    orchestrator.places.pause()  # nothing new may start at all
    assert await orchestrator.reconcile("run") == 0
    async with asyncio.timeout(10):
        (result,) = await bench.run(orchestrator, per_task=3)
    assert all(isinstance(attempt.outcome, Verdict) for attempt in result.attempts)
    assert [attempt.number for attempt in result.attempts] == [0, 0, 0]


async def test_a_run_that_is_closed_starts_nothing_more(bench: Bench) -> None:
    running = asyncio.Event()

    async def hang(sandbox: FakeSandbox, program: Program) -> Exit:
        running.set()
        await asyncio.sleep(3600)
        return Exit(code=0)

    bench.sandboxes.behaviour = hang
    orchestrator = bench.orchestrator(RunOptions(concurrency=1))
    results = orchestrator.run(bench.plan(4), Recording(Source.POLICY, Sampling()))
    first = asyncio.ensure_future(anext(results))
    await running.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(bench.sessions.opened) == 1 == len(await bench.store.attempts())
    assert orchestrator.places.taken == 0
