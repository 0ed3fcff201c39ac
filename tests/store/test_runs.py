"""Plan, attempts, outcomes, samples, steps: each once."""

from __future__ import annotations

import math

import msgspec
import pytest

from openforgerl.errors import AlreadyCommitted, StoreError
from openforgerl.store import CallStore, Database, RunStore, StepRecord
from openforgerl.types import (
    Attempt,
    Failure,
    Origin,
    PlacedImage,
    Sample,
    SampleSet,
    Source,
    Span,
    Stage,
    Totals,
)

from .builders import attempt, long_session, passed, rollout


@pytest.fixture
async def runs(database: Database) -> RunStore:
    store = RunStore(database)
    await store.put_run("run", "digest", {"train": {"steps": 3}})
    await store.plan([rollout(0), rollout(1, purpose="eval:sft"), rollout(2, step=1)])
    return store


def sample_set(attempt_id: str) -> SampleSet:
    sample = Sample(
        sample_id=f"{attempt_id}/c0",
        attempt_id=attempt_id,
        rollout_id="r0",
        group_id="g",
        ids=(1, 2, 3, 70_000, 5),
        spans=(
            Span(start=2, stop=4, call_id="c0", offset=0, state="trained", weights_version=3),
            Span(start=4, stop=5, call_id="c0", offset=2, state="masked", reason="stale", weights_version=1),
        ),
        logprobs=(-0.1, -1 / 3, -2e-300),
        source=Source.POLICY,
        advantage=0.25,
        images=(PlacedImage(sha256="x", start=0, count=1, grid=(1, 2, 2)),),
        template_digest="t",
    )
    return SampleSet(
        samples=(sample, msgspec.structs.replace(sample, sample_id=f"{attempt_id}/c1", spans=(), logprobs=None)),
        totals=Totals(sampled=4, trained=2, masked={"stale": 1}, dropped={"retry": 1}),
    )


def failed(one: Attempt) -> Attempt:
    failure = Failure(stage=Stage.RUN, kind="crash", origin=Origin.HARNESS, message="it died", retryable=True)
    return msgspec.structs.replace(one, finished_at=3.5, outcome=failure)


async def test_a_run_resumes_with_its_own_configuration_only(runs: RunStore) -> None:
    await runs.put_run("run", "digest")
    with pytest.raises(StoreError, match="another configuration"):
        await runs.put_run("run", "another")
    assert await runs.runs() == {"run": {"train": {"steps": 3}}}


async def test_planning_is_idempotent(runs: RunStore) -> None:
    await runs.plan([rollout(2, step=1), rollout(3), rollout(0)])
    assert [one.rollout_id for one in await runs.rollouts()] == ["r0", "r1", "r2", "r3"]
    assert [one.rollout_id for one in await runs.rollouts("train")] == ["r0", "r2", "r3"]
    assert [one.rollout_id for one in await runs.rollouts("train", 1)] == ["r2"]
    assert await runs.rollouts("eval:sft") == [rollout(1, purpose="eval:sft")]
    with pytest.raises(StoreError, match="planned differently"):
        await runs.plan([rollout(4), rollout(0, seed=8)])
    with pytest.raises(StoreError, match="call put_run first"):
        await runs.plan([rollout(5, run_id="other")])
    assert len(await runs.rollouts()) == 4


async def test_an_attempt_is_committed_once_with_its_samples(runs: RunStore) -> None:
    await runs.begin_attempt(attempt())
    assert await runs.unfinished() == [attempt()]
    done = passed(attempt())
    samples = sample_set("r0-a0")
    await runs.commit(done, samples)
    assert await runs.unfinished() == []
    assert await runs.attempts("r0") == [done]
    assert await runs.samples(["r0-a0", "unknown"]) == {"r0-a0": samples}
    with pytest.raises(AlreadyCommitted, match="first one stands"):
        await runs.commit(failed(attempt()), None)
    assert await runs.attempts() == [done]


async def test_an_altered_sample_is_an_error_that_names_it(runs: RunStore, database: Database) -> None:
    await runs.begin_attempt(attempt())
    await runs.commit(passed(attempt()), sample_set("r0-a0"))
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE samples SET ids = CAST('H' || substr(ids, 2) AS BLOB) WHERE position = 0"
            ).rowcount
        )
    )
    with pytest.raises(StoreError, match="sample r0-a0/c0 does not match its digest"):
        await runs.samples(["r0-a0"])


async def test_attempts_follow_one_another(runs: RunStore) -> None:
    await runs.begin_attempt(attempt())
    await runs.commit(failed(attempt()))
    await runs.begin_attempt(attempt(number=1))
    await runs.begin_attempt(attempt("r2"))
    assert await runs.attempts("r0") == [failed(attempt()), attempt(number=1)]
    assert [one.attempt_id for one in await runs.attempts()] == ["r0-a0", "r0-a1", "r2-a0"]
    assert await runs.samples(["r0-a0"]) == {}
    with pytest.raises(StoreError, match="begun already"):
        await runs.begin_attempt(attempt(number=1))
    with pytest.raises(StoreError, match="not planned"):
        await runs.begin_attempt(attempt("r9"))
    with pytest.raises(StoreError, match="cannot begin with an outcome"):
        await runs.begin_attempt(passed(attempt("r2", 5)))
    with pytest.raises(StoreError, match="never begun"):
        await runs.commit(passed(attempt("r1")))
    with pytest.raises(StoreError, match="without an outcome"):
        await runs.commit(attempt("r2"))


async def test_a_refused_commit_leaves_nothing(runs: RunStore) -> None:
    await runs.begin_attempt(attempt())
    with pytest.raises(StoreError, match="belongs to attempt r2-a0"):
        await runs.commit(passed(attempt()), sample_set("r2-a0"))
    assert await runs.unfinished() == [attempt()]
    await runs.commit(passed(attempt()), sample_set("r0-a0"))


async def test_a_step_and_its_attempts_are_recorded_once(runs: RunStore) -> None:
    for rollout_id in ("r0", "r1", "r2"):
        await runs.begin_attempt(attempt(rollout_id))
    await runs.commit(passed(attempt("r0")))
    await runs.commit(passed(attempt("r1")))
    await runs.commit(failed(attempt("r2")))
    await runs.record_step("rl", 1, 7, "checkpoints/1", {"loss": 0.5}, ["r1-a0"])
    with pytest.raises(AlreadyCommitted, match="step 1 of rl"):
        await runs.record_step("rl", 1, 7, "checkpoints/1", {}, ["r0-a0"])
    with pytest.raises(AlreadyCommitted, match="nothing trains twice"):
        await runs.record_step("rl", 2, 8, "checkpoints/2", {}, ["r0-a0", "r1-a0"])
    with pytest.raises(StoreError, match="comes after step 1"):
        await runs.record_step("rl", 0, 8, "checkpoints/0", {}, [])
    for bad in ("r2-a0", "unknown"):
        with pytest.raises(StoreError, match="has no verdict"):
            await runs.record_step("rl", 2, 8, "checkpoints/2", {}, [bad])
    # What was refused left nothing: r0-a0 can still train, and another stage may use what this one used.
    await runs.record_step("rl", 2, 8, "checkpoints/2", {"loss": 0.25}, ["r0-a0"])
    await runs.record_step("sft", 1, 1, "checkpoints/s", {}, ["r1-a0", "r0-a0"])
    assert await runs.steps("rl") == [
        StepRecord(
            stage="rl",
            step=step,
            weights_version=version,
            checkpoint=f"checkpoints/{step}",
            metrics={"loss": loss},
            attempt_ids=(used,),
        )
        for step, version, loss, used in ((1, 7, 0.5, "r1-a0"), (2, 8, 0.25, "r0-a0"))
    ]
    assert (await runs.steps("sft"))[0].attempt_ids == ("r1-a0", "r0-a0")
    assert await runs.steps("none") == []


async def test_what_an_unfinished_attempt_gathered_is_kept(runs: RunStore) -> None:
    with pytest.raises(StoreError, match="not under way"):
        await runs.note(attempt("r0"))
    await runs.begin_attempt(attempt("r0"))
    noted = msgspec.structs.replace(attempt("r0"), sandbox={"ref": {"pod": "p"}}, harness={"argv": ["pi"]})
    await runs.note(noted)
    assert await runs.unfinished() == [noted]
    with pytest.raises(StoreError, match="not under way"):
        await runs.note(passed(noted))
    await runs.commit(passed(noted))
    with pytest.raises(StoreError, match="not under way"):
        await runs.note(noted)


async def test_values(runs: RunStore) -> None:
    assert await runs.value("sft") is None
    await runs.put_value("sft", {"pass_at_1": [0.5, None]})
    await runs.put_value("sft", {"pass_at_1": [0.75, None]})
    assert await runs.value("sft") == {"pass_at_1": [0.75, None]}
    with pytest.raises(StoreError, match="JSON"):
        await runs.put_value("x", object())
    await runs.put_value("nan", math.nan)
    assert await runs.value("nan") is None


async def test_calls_are_copied_in_before_an_attempt_is_finished(runs: RunStore, database: Database) -> None:
    calls = long_session(3, session="r0-a0")
    await runs.import_calls("r0-a0", calls)
    await runs.import_calls("r0-a0", calls)
    assert await runs.calls("r0-a0") == calls
    assert await CallStore(database).calls("r0-a0") == calls
