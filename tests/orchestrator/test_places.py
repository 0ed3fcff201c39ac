"""Who starts when: order, places for each harness, start rate, a full engine, pausing, draining, giving up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from openforgerl.errors import OpenForgeError
from openforgerl.orchestrator import RunOptions
from openforgerl.orchestrator.places import Order, Places
from openforgerl.testing.fake_sandbox import FakeSandbox, Program
from openforgerl.types import Exit, Failure, Verdict

from .bench import Bench


class Stage:
    """Takers that hold their places until told, and the order in which they got them."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.started: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def enter(self, name: str, order: Order, harness: str = "pi") -> None:
        self.ends[name] = asyncio.Event()

        async def hold() -> None:
            async with self.places.place(harness, order):
                self.started.append(name)
                await self.ends[name].wait()

        self.tasks[name] = asyncio.create_task(hold())

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  what is waited for is a timer inside
            await asyncio.sleep(0.005)


async def test_a_refill_of_an_early_group_goes_before_a_later_group() -> None:
    stage = Stage(Places(RunOptions(concurrency=1)))
    stage.enter("first", (0, 0))
    await settle()
    stage.enter("later", (2, 0))
    stage.enter("refill", (0, 1))
    stage.enter("next", (1, 0))
    for name in ("first", "refill", "next", "later"):
        assert stage.started[-1] == name
        await stage.end(name)
    assert stage.places.taken == 0


async def test_a_harness_without_a_place_holds_up_no_other() -> None:
    stage = Stage(Places(RunOptions(concurrency=3, per_harness={"codex": 1})))
    for index, (name, harness) in enumerate([("c0", "codex"), ("c1", "codex"), ("p0", "pi"), ("p1", "pi")]):
        stage.enter(name, (index, 0), harness)
    await settle()
    assert stage.started == ["c0", "p0", "p1"]
    await stage.end("p0")
    assert stage.started == ["c0", "p0", "p1"]  # a place is free, but not for a second codex
    await stage.end("c0")
    assert stage.started[-1] == "c1"
    await stage.end("c1")
    await stage.end("p1")


async def test_a_cancelled_taker_leaves_its_place_to_the_next() -> None:
    stage = Stage(Places(RunOptions(concurrency=1)))
    for index, name in enumerate(("holds", "goes", "next")):
        stage.enter(name, (index, 0))
    await settle()
    stage.tasks["goes"].cancel()
    await settle()
    stage.ends["holds"].set()
    await settle()
    assert stage.started == ["holds", "next"]
    await stage.end("next")
    # granted in the very step of the loop in which it is cancelled
    stage.enter("a", (0, 0))
    await settle()
    stage.enter("b", (1, 0))
    stage.enter("c", (2, 0))
    await settle()
    stage.ends["a"].set()
    await stage.tasks["a"]
    stage.tasks["b"].cancel()
    await settle()
    assert stage.started[-1] == "c"
    await stage.end("c")
    assert stage.places.taken == 0


async def test_starts_are_spread_out_and_not_saved_up() -> None:
    now = 100.0
    places = Places(RunOptions(concurrency=100, starts_per_second=20.0), clock=lambda: now)
    stage = Stage(places)
    for index in range(3):
        stage.enter(f"s{index}", (index, 0))
    await settle()
    assert stage.started == ["s0"]
    now += 0.05
    await until(lambda: len(stage.started) == 2)
    now += 10.0  # a quiet time earns no burst
    await until(lambda: len(stage.started) == 3)
    stage.enter("s3", (3, 0))
    await settle()
    assert len(stage.started) == 3
    now += 0.05
    await until(lambda: len(stage.started) == 4)
    for index in range(4):
        await stage.end(f"s{index}")


async def test_a_full_engine_holds_back_starts_but_never_the_only_one() -> None:
    calls = 8
    stage = Stage(Places(RunOptions(concurrency=4, hold_at_calls=8), load=lambda: calls))
    stage.enter("a", (0, 0))
    stage.enter("b", (1, 0))
    await asyncio.sleep(0.3)
    assert stage.started == ["a"]  # with nothing in flight of ours, calls of others would hold it for ever
    calls = 7
    await until(lambda: stage.started == ["a", "b"])
    await stage.end("a")
    await stage.end("b")


async def test_nothing_starts_while_paused() -> None:
    places = Places(RunOptions(concurrency=2))
    stage = Stage(places)
    places.pause()
    stage.enter("a", (0, 0))
    await settle()
    assert stage.started == []
    places.resume()
    await settle()
    assert stage.started == ["a"]
    await stage.end("a")


def held_until(release: asyncio.Event, running: asyncio.Event) -> Callable[[FakeSandbox, Program], Awaitable[Exit]]:
    async def hold(sandbox: FakeSandbox, program: Program) -> Exit:
        running.set()
        await release.wait()
        return Exit(code=0)

    return hold


@pytest.mark.parametrize("seconds", [0.0, 30.0])
async def test_an_interrupted_run_lets_what_is_in_flight_finish(bench: Bench, seconds: float) -> None:
    release, running = asyncio.Event(), asyncio.Event()
    bench.sandboxes.behaviour = held_until(release, running)
    run = asyncio.create_task(bench.run(bench.orchestrator(RunOptions(concurrency=1, drain_seconds=seconds))))
    await running.wait()
    run.cancel()
    await settle()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    attempts = await bench.store.attempts()
    assert [isinstance(attempt.outcome, Verdict) for attempt in attempts] == [seconds > 0]  # and nothing new started
    assert bench.sandboxes.live == {}


async def test_a_drain_ends_at_its_limit_and_at_a_second_interrupt(bench: Bench) -> None:
    for second in (False, True):
        running = asyncio.Event()
        bench.sandboxes.behaviour = held_until(asyncio.Event(), running)
        options = RunOptions(concurrency=2, drain_seconds=60.0 if second else 0.05)
        run = asyncio.create_task(bench.run(bench.orchestrator(options)))
        await running.wait()
        run.cancel()
        if second:
            await settle()
            assert not run.done()
            run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert bench.sandboxes.live == {}


async def test_a_run_that_only_fails_in_one_way_ends_and_says_so(bench: Bench) -> None:
    async def crash(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=1)

    bench.sandboxes.behaviour = crash
    with pytest.raises(ExceptionGroup) as caught:
        await bench.run(bench.orchestrator(RunOptions(concurrency=1, stop_after=3)), per_task=8)
    (error,) = caught.value.exceptions
    assert (
        isinstance(error, OpenForgeError) and "3 attempts in a row" in str(error) and "stage run, crash" in str(error)
    )
    assert len(await bench.store.attempts()) == 3


async def test_other_failures_and_verdicts_start_the_row_anew(bench: Bench) -> None:
    codes = iter([1, 1, 0, 1, 1, 7, 1, 1] + [0] * 40)

    async def sometimes(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=next(codes))

    bench.sandboxes.behaviour = sometimes
    options = RunOptions(concurrency=1, stop_after=3, refill_limit=20)
    results = await bench.run(bench.orchestrator(options))
    assert not any(result.dropped for result in results)
    failed = [attempt for attempt in await bench.store.attempts() if isinstance(attempt.outcome, Failure)]
    assert len(failed) == 6


async def test_the_wait_for_a_place_is_recorded(bench: Bench) -> None:
    await bench.run(bench.orchestrator(RunOptions(concurrency=1)))
    waits = [attempt.timings["queue"] for attempt in await bench.store.attempts()]
    assert len(waits) == 8 and min(waits) >= 0 and max(waits) > min(waits)
