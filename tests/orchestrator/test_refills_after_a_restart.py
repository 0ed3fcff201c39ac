"""What a group has left to refill after a restart: the refills that were begun are its own, whoever asks first."""

from __future__ import annotations

import dataclasses

import msgspec

from openforgerl.orchestrator import RunOptions
from openforgerl.testing.fake_sandbox import FakeSandbox, Program
from openforgerl.types import Attempt, Failure, Origin, SandboxSpec, Stage, Verdict

from .bench import Bench, LastingSandboxes

OOM = Failure(stage=Stage.SANDBOX, kind="oom", origin=Origin.INFRASTRUCTURE, message="", retryable=True)


async def test_a_refill_that_was_begun_is_finished_though_another_asks_first(bench: Bench) -> None:
    """Two rollouts failed, the second took the only refill, and the process died while that was at work."""
    lasting = LastingSandboxes()
    bench = dataclasses.replace(bench, sandboxes=lasting, tasks=bench.tasks[:1])
    first, second = (group := bench.plan(2)[0])
    await bench.store.plan(group)
    for rollout in (second, first):
        failed = Attempt(attempt_id=f"{rollout.rollout_id}-a0", rollout_id=rollout.rollout_id, number=0, started_at=1.0)
        await bench.store.begin_attempt(failed)
        await bench.store.commit(msgspec.structs.replace(failed, finished_at=2.0, outcome=OOM), None)
    refill = Attempt(
        attempt_id=f"{second.rollout_id}-a1",
        rollout_id=second.rollout_id,
        number=1,
        started_at=2.0,
        sandbox={"backend": "fake"},
    )
    await bench.store.begin_attempt(refill)
    lasting.live[refill.attempt_id] = FakeSandbox(lasting, SandboxSpec(run_id="run"), refill.attempt_id)
    lasting.live[refill.attempt_id].programs.append(Program(("agent",), {}, b"", 5.0))
    orchestrator = bench.orchestrator(RunOptions(refill_limit=1))
    await orchestrator.reconcile("run")
    (result,) = await bench.run(orchestrator, per_task=2)
    assert await bench.store.unfinished() == []
    assert lasting.live == {} and result.refills == 1
    assert [attempt.attempt_id for attempt in result.attempts] == [f"{first.rollout_id}-a0", refill.attempt_id]
    assert isinstance(result.attempts[1].outcome, Verdict)
