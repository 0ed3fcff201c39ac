"""Outcomes, refills and resume, on fakes: whose failure it is decides what happens next."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import AlreadyCommitted, StageError
from openforgerl.orchestrator import OrchestratedGroups, Recording, RunOptions, plan_rollouts
from openforgerl.orchestrator.assembly import keep_tokenizer
from openforgerl.orchestrator.runs import INTERRUPTED
from openforgerl.rollout import OnTimeout, RolloutOptions
from openforgerl.testing.fake_sandbox import FakeSandbox, FakeSandboxes, Program
from openforgerl.types import (
    Attempt,
    CallStatus,
    Exit,
    Failure,
    Origin,
    Sampling,
    SandboxSpec,
    Source,
    Stage,
    Task,
    Verdict,
)

from .bench import SECRET, Bench, FakeSessions, RewardFromIndex


async def test_every_rollout_gets_its_verdict_and_samples(bench: Bench) -> None:
    results = await bench.run(bench.orchestrator())
    assert len(results) == 2
    for result in results:
        assert [a.outcome.reward for a in result.attempts if isinstance(a.outcome, Verdict)] == [1.0, 0.0, 1.0, 0.0]
        assert not result.dropped and result.refills == 0
    stored = await bench.store.samples([attempt.attempt_id for result in results for attempt in result.attempts])
    assert len(stored) == 8
    for found in stored.values():
        (sample,) = found.samples
        assert (sample.ids, sample.trained_tokens, sample.logprobs) == ((1, 2, 3, 4, 5), 2, (-0.5, -0.25))
        assert (found.totals.sampled, found.totals.trained) == (2, 2)


async def test_the_order_of_an_attempt(bench: Bench) -> None:
    """Seal before kill, kill before export, and grading in another sandbox than the agent's."""
    bench.tasks = bench.tasks[:1]
    await bench.run(bench.orchestrator(), per_task=1)
    (opened,) = bench.sessions.opened
    events = [(event.verb, event.attempt_id.removeprefix(opened)) for event in bench.sandboxes.events]
    assert events == [
        ("create", ""),
        ("write", ""),
        ("exec", ""),
        ("kill_agent", ""),
        ("export", ""),
        ("create", "-verify"),
        ("close", "-verify"),
        ("close", ""),
    ]
    assert bench.sessions.sealed[0] == opened


async def test_the_key_is_in_no_record(bench: Bench, tmp_path: Path) -> None:
    await bench.run(bench.orchestrator())
    await bench.database.close()
    assert all(SECRET.encode() not in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


@pytest.mark.parametrize("verb", ["create", "write", "exec", "kill_agent", "export"])
async def test_a_failure_of_ours_is_refilled_and_never_a_reward(bench: Bench, verb: str) -> None:
    bench.sandboxes.plant(verb, OSError("the disk is gone"), times=1)  # type: ignore[arg-type]
    results = await bench.run(bench.orchestrator(RunOptions(concurrency=1)))
    attempts = await bench.store.attempts()
    failed = [attempt.outcome for attempt in attempts if isinstance(attempt.outcome, Failure)]
    assert [failure.origin.ours for failure in failed] == [True]
    assert len(attempts) == 9 and sum(result.refills for result in results) == 1
    assert not any(result.dropped for result in results)


async def test_a_verifier_crash_is_a_failure_and_refilled(bench: Bench) -> None:
    bench.verifier.faults = [
        RuntimeError("bug in the verifier"),
        StageError(Stage.VERIFY, "reward_absent", "no reward", origin=Origin.VERIFIER, retryable=True),
    ]
    results = await bench.run(bench.orchestrator())
    failures = [a.outcome for a in await bench.store.attempts() if isinstance(a.outcome, Failure)]
    assert {(failure.kind, failure.origin) for failure in failures} == {
        ("crash", Origin.VERIFIER),
        ("reward_absent", Origin.VERIFIER),
    }
    assert not any(result.dropped for result in results)


async def test_refills_are_bounded_by_the_group_and_the_group_is_dropped(bench: Bench) -> None:
    async def crash(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=1)

    bench.sandboxes.behaviour = crash
    results = await bench.run(bench.orchestrator())
    for result in results:
        assert result.dropped and result.refills == 4
        assert all(isinstance(attempt.outcome, Failure) for attempt in result.attempts)
    assert len(await bench.store.attempts()) == 2 * (4 + 4)


async def test_a_failure_that_cannot_be_retried_is_not(bench: Bench) -> None:
    error = StageError(Stage.SETUP, "input", "bad task", origin=Origin.HARNESS, retryable=False)
    bench.sandboxes.plant("write", error, times=100)
    await bench.run(bench.orchestrator())
    assert len(await bench.store.attempts()) == 8


async def test_what_the_model_caused_is_graded(bench: Bench) -> None:
    async def ended_by_the_model(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=7)

    bench.sandboxes.behaviour = ended_by_the_model
    results = await bench.run(bench.orchestrator())
    endings = {a.outcome.ending for r in results for a in r.attempts if isinstance(a.outcome, Verdict)}
    assert endings == {"crashed_by_policy"}


async def test_a_state_too_large_to_carry_is_graded_lowest_and_not_discarded(bench: Bench) -> None:
    """Else a policy could avoid its grade, and its whole group's, by filling its work directory."""

    async def fill(sandbox: FakeSandbox, program: Program) -> Exit:
        if sandbox.attempt_id.endswith("-0-a0"):  # a place that the verifier would reward
            await sandbox.write(f"{SandboxSpec(run_id='run').workdir}/junk", b"x" * (2**20 + 1))
        return Exit(code=0)

    bench.sandboxes.behaviour = fill
    bench.tasks = bench.tasks[:1]
    (result,) = await bench.run(bench.orchestrator(rollout=RolloutOptions(export_mb=1)))
    assert (result.dropped, result.refills) == (False, 0)
    filled, *others = [attempt.outcome for attempt in result.attempts if isinstance(attempt.outcome, Verdict)]
    assert (filled.reward, filled.passed, filled.graded.value, filled.ending) == (0.0, False, "assigned", "limit:state")
    assert [verdict.reward for verdict in others] == [0.0, 1.0, 0.0]


async def test_a_task_that_is_itself_too_large_to_carry_is_no_reward(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (2**20 + 1))

    async def idle(sandbox: FakeSandbox, program: Program) -> Exit:
        await sandbox.write(f"{SandboxSpec(run_id='run').workdir}/big", b"x" * (2**20 + 1))
        return Exit(code=0)

    bench.sandboxes.behaviour = idle
    bench.tasks = bench.tasks[:1]
    orchestrator = bench.orchestrator(rollout=RolloutOptions(export_mb=1))
    workdir = SandboxSpec(run_id="run").workdir
    spec = SandboxSpec(run_id="run", files={f"{workdir}/big": str(tmp_path / "big")})
    orchestrator.rooms = dataclasses.replace(orchestrator.rooms, spec=lambda task: spec)
    (result,) = await bench.run(orchestrator, per_task=1)
    assert result.dropped


@pytest.mark.parametrize(
    ("on_timeout", "rewards", "samples"),
    [
        (OnTimeout.DISCARD, [], 0),
        (OnTimeout.PARTIAL, [], 1),
        (OnTimeout.GRADE, [1.0], 1),
        (OnTimeout.ZERO, [0.0], 1),
    ],
)
async def test_a_hang_follows_the_setting(
    bench: Bench, on_timeout: OnTimeout, rewards: list[float], samples: int
) -> None:
    async def hang(sandbox: FakeSandbox, program: Program) -> Exit:
        await asyncio.sleep(60)
        return Exit(code=0)

    bench.sandboxes.behaviour = hang
    bench.tasks = bench.tasks[:1]
    options = RolloutOptions(on_timeout=on_timeout, agent_timeout=0.05)
    (result,) = await bench.run(bench.orchestrator(RunOptions(refill_limit=0), options), per_task=1)
    (attempt,) = result.attempts
    assert [attempt.outcome.reward for _ in rewards if isinstance(attempt.outcome, Verdict)] == rewards
    assert len(await bench.store.samples([attempt.attempt_id])) == samples
    if not rewards:
        assert isinstance(attempt.outcome, Failure) and attempt.outcome.origin is Origin.BUDGET


async def test_an_engine_error_at_the_end_is_infrastructure(bench: Bench) -> None:
    bench.sessions.status = CallStatus.ERROR
    results = await bench.run(bench.orchestrator(RunOptions(refill_limit=0)))
    kinds = {a.outcome.kind for r in results for a in r.attempts if isinstance(a.outcome, Failure)}
    assert kinds == {"model_call"}


async def test_a_restart_runs_nothing_twice_and_leaves_nothing_open(bench: Bench) -> None:
    first = await bench.run(bench.orchestrator())
    before = bench.sandboxes.counts()["create"]
    again = await bench.run(bench.orchestrator())
    assert bench.sandboxes.counts()["create"] == before

    def key(result: object) -> str:
        return result.rollouts[0].group_id  # type: ignore[attr-defined]

    assert [r.attempts for r in sorted(again, key=key)] == [r.attempts for r in sorted(first, key=key)]


async def test_a_refill_is_another_draw_and_a_restart_the_same(bench: Bench) -> None:
    """With the seed of what was discarded, a refill would time out (or crash its harness) in the same way again."""
    bench.tasks = bench.tasks[:1]
    ((rollout,),) = bench.plan(per_task=1)
    bench.sandboxes.plant("exec", OSError("gone"), times=2)  # type: ignore[arg-type]
    await bench.run(bench.orchestrator(RunOptions(refill_limit=2)), per_task=1)
    seeds = [bench.sessions.seeds[f"{rollout.rollout_id}-a{number}"] for number in range(3)]
    assert seeds[0] == rollout.seed and len(set(seeds)) == 3
    again = Bench(bench.folder, bench.database, FakeSessions(), FakeSandboxes(), RewardFromIndex(), bench.tasks)
    other = msgspec.structs.replace(rollout, rollout_id="r-0", group_id="other")
    await again.store.plan([other])
    await again.store.begin_attempt(Attempt(attempt_id="r-0-a0", rollout_id="r-0", number=0, started_at=1.0))
    orchestrator = again.orchestrator()
    await orchestrator.reconcile("run")
    async for _ in orchestrator.run([[other]], Recording(Source.POLICY, Sampling())):
        pass
    assert again.sessions.seeds == {"r-0-a1": rollout.seed}


async def test_an_attempt_whose_process_died_is_closed_and_run_again_for_free(bench: Bench) -> None:
    bench.tasks = bench.tasks[:1]
    (group,) = bench.plan(1)
    await bench.store.plan(group)
    lost = Attempt(attempt_id=f"{group[0].rollout_id}-a0", rollout_id=group[0].rollout_id, number=0, started_at=1.0)
    await bench.store.begin_attempt(lost)
    orchestrator = bench.orchestrator(RunOptions(refill_limit=0))
    assert await orchestrator.reconcile("run") == 1
    (result,) = await bench.run(orchestrator, per_task=1)
    attempts = await bench.store.attempts()
    assert [attempt.number for attempt in attempts] == [0, 1]
    assert isinstance(attempts[0].outcome, Failure) and attempts[0].outcome.kind == INTERRUPTED
    assert isinstance(result.attempts[0].outcome, Verdict) and result.refills == 0
    with pytest.raises(AlreadyCommitted):
        await bench.store.commit(attempts[0], None)


async def test_cancelling_seals_the_session_and_closes_the_sandbox(bench: Bench) -> None:
    begun = 0
    both = asyncio.Event()

    async def hang(sandbox: FakeSandbox, program: Program) -> Exit:
        nonlocal begun
        begun += 1
        if begun == 2:
            both.set()
        await asyncio.sleep(60)
        return Exit(code=0)

    bench.sandboxes.behaviour = hang
    running = asyncio.create_task(bench.run(bench.orchestrator(RunOptions(concurrency=2))))
    await both.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert set(bench.sessions.opened) == set(bench.sessions.sealed)
    assert bench.sandboxes.live == {}
    assert {attempt.attempt_id for attempt in await bench.store.unfinished()} == set(bench.sessions.opened)


async def test_concurrency_is_bounded(bench: Bench) -> None:
    most = 0

    async def count(sandbox: FakeSandbox, program: Program) -> Exit:
        nonlocal most
        most = max(most, sum(not name.endswith("-verify") for name in bench.sandboxes.live))
        await asyncio.sleep(0.01)
        return Exit(code=0)

    bench.sandboxes.behaviour = count
    await bench.run(bench.orchestrator(RunOptions(concurrency=3)))
    assert most == 3


async def test_groups_are_complete_in_plan_order_and_dropped_ones_are_left_out(bench: Bench) -> None:
    bench.sandboxes.plant("exec", OSError("gone"), times=1)
    dropped: list[bool] = []
    source = OrchestratedGroups(
        orchestrator=bench.orchestrator(RunOptions(concurrency=1, refill_limit=0)),
        recording=Recording(Source.POLICY, Sampling()),
        run_id="run",
        harness="fake",
        seed=0,
        on_group=lambda result: dropped.append(result.dropped),
    )
    groups = [g async for g in source.collect(bench.tasks, group_size=4, weights_version=3, step=1)]
    assert sorted(dropped) == [False, True]
    assert [[rollout.task for rollout, _, _ in group] for group in groups] == [["t/b"] * 4]
    assert all(len(samples) == 1 for group in groups for _, _, samples in group)


async def test_eval_stages_share_their_seeds_and_nothing_else_does(bench: Bench) -> None:
    def seeds(purpose: str, step: int = 0) -> list[int]:
        groups = plan_rollouts(bench.tasks, run_id="r", purpose=purpose, harness="h", per_task=2, seed=1, step=step)
        return [rollout.seed for group in groups for rollout in group]

    assert seeds("eval:sft") == seeds("eval:rl")
    everything = [*seeds("eval:sft"), *seeds("train", 1), *seeds("train", 2)]
    assert len(set(everything)) == len(everything)


def test_a_tokenizer_whose_copying_was_killed_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "tokenizer.json").write_text("0123456789")

    def killed(source: Path, target: Path) -> None:
        target.write_text(source.read_text()[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "copyfile", killed)
        keep_tokenizer(folder, model)
    keep_tokenizer(folder, model)
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "0123456789"


@pytest.mark.parametrize(
    ("options", "kind"),
    [(RolloutOptions(start_timeout=0.05), "stalled"), (RolloutOptions(attempt_timeout=0.05), "attempt_timeout")],
)
async def test_a_stage_that_stalls_is_a_failure_of_ours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, options: RolloutOptions, kind: str
) -> None:
    async def hang(self: FakeSandbox, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(FakeSandbox, "write", hang)
    results = await bench.run(bench.orchestrator(RunOptions(concurrency=4, refill_limit=0), options), per_task=2)
    outcomes = [attempt.outcome for result in results for attempt in result.attempts]
    assert {(o.stage, o.kind, o.origin) for o in outcomes if isinstance(o, Failure)} == {
        (Stage.SETUP, kind, Origin.INFRASTRUCTURE)
    }
    assert len(outcomes) == 4 and bench.sandboxes.live == {}
    assert set(bench.sessions.opened) == set(bench.sessions.sealed)


async def test_an_attempt_says_what_made_it(bench: Bench) -> None:
    await bench.run(bench.orchestrator())
    for attempt in await bench.store.attempts():
        seed = bench.sessions.seeds[attempt.attempt_id]
        digest = {"t/a": "a" * 64, "t/b": "b" * 64}[
            next(r.task for r in await bench.store.rollouts() if r.rollout_id == attempt.rollout_id)
        ]
        assert attempt.provenance == {"config": "c" * 8, "task": digest, "seed": seed}
        assert set(attempt.timings) >= {"queue", "session", "sandbox", "setup", "run", "seal", "kill", "verify"}


def test_a_group_never_mixes_harnesses_and_draws_follow_the_weights() -> None:
    tasks = [Task(name=f"t/{n}", digest="d", path="/t", instruction="x") for n in range(300)]

    def drawn(weights: dict[str, float], seed: int = 0) -> list[str]:
        groups = plan_rollouts(tasks, run_id="r", purpose="train", harness=weights, per_task=4, seed=seed, step=1)
        assert all(len({rollout.harness for rollout in group}) == 1 for group in groups)
        return [group[0].harness for group in groups]

    first = drawn({"pi": 3.0, "codex": 1.0})
    assert first == drawn({"codex": 1.0, "pi": 3.0}) != drawn({"pi": 3.0, "codex": 1.0}, seed=1)
    # 225 expected of 300, standard deviation 7.5: within four of them
    assert 195 <= first.count("pi") <= 255
    assert set(drawn({"pi": 1.0})) == {"pi"}
