"""The staleness limit of the config, from the end of an attempt to the trainer's hand."""

from __future__ import annotations

from openforgerl.orchestrator import OrchestratedGroups, Recording
from openforgerl.trajectory import SamplePolicy
from openforgerl.types import Sampling, Source

from .bench import Bench


async def collected(bench: Bench, limit: int | None, version: int) -> tuple[list[str | None], dict[str, int]]:
    """Reasons of the spans handed out, and what the attempts' own accounts masked."""
    orchestrator = bench.orchestrator()  # its engine serves version 3; every call says version 0
    orchestrator.policy = SamplePolicy(max_staleness=limit)
    source = OrchestratedGroups(
        orchestrator=orchestrator,
        recording=Recording(Source.POLICY, Sampling()),
        run_id="run",
        harness="fake",
        seed=0,
    )
    groups = [g async for g in source.collect(bench.tasks[:1], group_size=1, weights_version=version, step=1)]
    ((_, attempt, samples),) = groups[0]
    stored = (await bench.store.samples([attempt.attempt_id]))[attempt.attempt_id]
    return [span.reason for sample in samples for span in sample.spans], stored.totals.masked


async def test_fresh_enough_at_both_ends(bench: Bench) -> None:
    assert await collected(bench, 4, 4) == ([None], {})


async def test_stale_when_its_attempt_ended(bench: Bench) -> None:
    assert await collected(bench, 2, 3) == (["stale"], {"stale": 2})


async def test_stale_only_by_the_time_it_trains(bench: Bench) -> None:
    assert await collected(bench, 3, 4) == (["stale"], {})


async def test_no_limit(bench: Bench) -> None:
    assert await collected(bench, None, 99) == ([None], {})
