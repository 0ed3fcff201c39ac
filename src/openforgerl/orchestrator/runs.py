"""The queue of one run. Every attempt that starts is committed once, whatever happens to the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from openforgerl.errors import InputError, OpenForgeError
from openforgerl.orchestrator.options import RunOptions
from openforgerl.orchestrator.places import Order, Places
from openforgerl.protocols import AdoptingSandboxes
from openforgerl.rollout import AttemptWork, OnTimeout, Rooms, run_attempt
from openforgerl.store import RunStore
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import (
    Attempt,
    Failure,
    ModelCall,
    Origin,
    Rollout,
    SampleSet,
    Sampling,
    SandboxRef,
    Source,
    Stage,
    Task,
    Verdict,
)

log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""Failure kind of an attempt whose process died; does not count against the refill budget."""
OF_A_KILL = frozenset({INTERRUPTED, "not_started", "not_adopted"})
"""Failure kinds that the death of an orchestrating process brings; the last two where an attempt's sandbox outlived it
and could not be taken over. None counts against the refill budget: twenty kills must drop no group."""


@dataclass(frozen=True, slots=True)
class Recording:
    """How attempts become samples."""

    source: Source
    sampling: Sampling
    policy: SamplePolicy | None = None
    """None = the orchestrator's."""


@dataclass(slots=True)
class GroupResult:
    """A finished group: the last attempt of every rollout, in plan order."""

    rollouts: Sequence[Rollout]
    attempts: list[Attempt]
    refills: int
    """Failed attempts that were replaced."""

    @property
    def dropped(self) -> bool:
        """True when the refill budget ran out: at least one rollout has no verdict."""
        return any(not isinstance(attempt.outcome, Verdict) for attempt in self.attempts)


@dataclass(slots=True)
class _Budget:
    """Refills left to one group, shared by its rollouts."""

    left: int
    used: int = 0

    def take(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        self.used += 1
        return True


@dataclass(slots=True)
class _Breaker:
    """Ends a run that only fails: attempts in a row with one and the same failure of ours."""

    limit: int | None
    row: int = 0
    last: tuple[Stage, str] | None = None

    def take(self, attempt: Attempt) -> None:
        """Count one finished attempt. Raises OpenForgeError at the limit."""
        outcome = attempt.outcome
        if not isinstance(outcome, Failure) or not outcome.origin.ours or _interrupted(attempt):
            self.row, self.last = 0, None
            return
        way = (outcome.stage, outcome.kind)
        self.row = self.row + 1 if way == self.last else 1
        self.last = way
        if self.limit is not None and self.row >= self.limit:
            raise OpenForgeError(
                f"{self.row} attempts in a row failed in the same way (stage {outcome.stage}, {outcome.kind}; the "
                f"last, {attempt.attempt_id}: {outcome.message}). Mend that, then the same command goes on; "
                "run.stop_after sets how many"
            )


@dataclass(slots=True)
class Orchestrator:
    """Runs groups of rollouts with bounded concurrency; resumable by the store. `load`: model calls under way now."""

    rooms: Rooms
    store: RunStore
    tasks: Mapping[str, Task]
    options: RunOptions
    weights_version: Callable[[], int]
    on_attempt: Callable[[Rollout, Attempt], None] = lambda rollout, attempt: None
    policy: SamplePolicy = field(default_factory=SamplePolicy)
    load: Callable[[], int] = lambda: 0
    places: Places = field(init=False)
    _breaker: _Breaker = field(init=False)
    _adoptable: dict[str, SandboxRef] = field(default_factory=dict[str, SandboxRef])
    """Unfinished attempt of an earlier process → its sandbox, which lives."""

    def __post_init__(self) -> None:
        self.places = Places(self.options, self.load)
        self._breaker = _Breaker(self.options.stop_after)

    async def reconcile(self, run_id: str) -> int:
        """After a restart: keep the attempts whose sandboxes live on, to go on with them when their turn comes;
        commit the others as interrupted, and destroy what else is left of sandboxes.

        Returns how many attempts were interrupted.
        """
        unfinished = await self.store.unfinished()
        sandboxes = self.rooms.sandboxes
        if unfinished and isinstance(sandboxes, AdoptingSandboxes):
            alive = {ref.attempt_id: ref for ref in await sandboxes.list(run_id)}
            # What was noted of an attempt says that its sandbox was set up: only then is there something to go on with.
            self._adoptable = {
                attempt.attempt_id: alive[attempt.attempt_id]
                for attempt in unfinished
                if attempt.sandbox and attempt.attempt_id in alive
            }
            reaped = await sandboxes.reap_others(run_id, self._adoptable.keys())
            unfinished = [attempt for attempt in unfinished if attempt.attempt_id not in self._adoptable]
        else:
            reaped = await sandboxes.reap(run_id)
        for attempt in unfinished:
            with contextlib.suppress(InputError):  # it may have died before its session was opened
                await self.rooms.sessions.seal(attempt.attempt_id)
            failure = Failure(
                stage=Stage.RUN,
                kind=INTERRUPTED,
                origin=Origin.INFRASTRUCTURE,
                message="the orchestrating process ended before this attempt did",
                retryable=True,
            )
            await self.store.commit(msgspec.structs.replace(attempt, finished_at=time.time(), outcome=failure), None)
        if reaped or unfinished or self._adoptable:
            log.info(
                "resumed: %d attempts go on in their sandboxes, %d unfinished ones closed, %d sandboxes reaped",
                len(self._adoptable),
                len(unfinished),
                reaped,
            )
        return len(unfinished)

    async def run(self, groups: Sequence[Sequence[Rollout]], recording: Recording) -> AsyncIterator[GroupResult]:
        """Run all groups; yields each as it completes. Closing the iterator cancels what is in flight, after
        `drain_seconds` in which it may finish."""
        planned = [rollout for group in groups for rollout in group]
        await self.store.plan(planned)
        earlier = dict(zip([one.rollout_id for one in planned], await self._earlier(planned), strict=True))
        running = [
            asyncio.create_task(self._group(group, [earlier[one.rollout_id] for one in group], recording, place))
            for place, group in enumerate(groups)
        ]
        try:
            for done in asyncio.as_completed(running):
                yield await done
        except asyncio.CancelledError:
            await self._drain()
            raise
        finally:
            self.places.pause()  # what leaves its place now must give it to nobody
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self.places.resume()

    async def _drain(self) -> None:
        """Start nothing more and wait until nothing is in flight, `drain_seconds` at most."""
        if not (self.options.drain_seconds and self.places.taken):
            return
        log.warning(
            "%d attempts in flight get %g s to finish; interrupt again to stop at once",
            self.places.taken,
            self.options.drain_seconds,
        )
        self.places.pause()
        try:
            async with asyncio.timeout(self.options.drain_seconds):
                await self.places.emptied()
        except TimeoutError:
            log.warning("%d attempts are still in flight; they are cancelled", self.places.taken)

    async def _earlier(self, rollouts: Sequence[Rollout]) -> Sequence[Sequence[Attempt]]:
        """What earlier processes have begun of each, in order."""
        found = await asyncio.gather(*(self.store.attempts(rollout.rollout_id) for rollout in rollouts))
        return [sorted(attempts, key=lambda attempt: attempt.number) for attempts in found]

    async def _group(
        self, group: Sequence[Rollout], earlier: Sequence[Sequence[Attempt]], recording: Recording, place: int
    ) -> GroupResult:
        """One group, each rollout with its `earlier` attempts. Their refills are the group's, whoever asks first now:
        an attempt that was begun is gone on with, however many of the others have failed meanwhile."""
        limit = len(group) if self.options.refill_limit is None else self.options.refill_limit
        refilled = sum(not _interrupted(attempt) for attempts in earlier for attempt in attempts[:-1])
        budget = _Budget(limit - refilled, refilled)
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(
                    self._rollout(rollout, attempts, recording, budget, (rollout.step, place, rollout.index))
                )
                for rollout, attempts in zip(group, earlier, strict=True)
            ]
        return GroupResult(group, [member.result() for member in members], budget.used)

    async def _rollout(
        self, rollout: Rollout, earlier: Sequence[Attempt], recording: Recording, budget: _Budget, order: Order
    ) -> Attempt:
        """Attempts until a verdict, a failure that cannot be retried, or the end of the group's refills."""
        number = redraws = 0
        for position, attempt in enumerate(earlier, 1):
            if attempt.outcome is None:
                with self.places.held(rollout.harness):
                    attempt = await self._finish(attempt, rollout, recording, waited=0.0)
                    self._watch(attempt)
                self.on_attempt(rollout, attempt)
            number = attempt.number + 1
            if position == len(earlier) and not self._again(attempt, budget):
                return attempt
            redraws += not _interrupted(attempt)
        while True:
            async with self.places.place(rollout.harness, order) as waited:
                attempt = await self._attempt(rollout, number, _redrawn(rollout.seed, redraws), recording, waited)
                self._watch(attempt)
            self.on_attempt(rollout, attempt)
            if not self._again(attempt, budget):
                return attempt
            number += 1
            redraws += not _interrupted(attempt)

    def _watch(self, attempt: Attempt) -> None:
        """Give up when everything fails alike: nothing more starts from the moment in which that is seen."""
        try:
            self._breaker.take(attempt)
        except OpenForgeError:
            self.places.pause()
            raise

    @staticmethod
    def _again(attempt: Attempt, budget: _Budget) -> bool:
        outcome = attempt.outcome
        if not isinstance(outcome, Failure):
            return False
        if _interrupted(attempt):
            return True
        return outcome.retryable and budget.take()

    async def _attempt(self, rollout: Rollout, number: int, seed: int, recording: Recording, waited: float) -> Attempt:
        attempt = Attempt(
            attempt_id=f"{rollout.rollout_id}-a{number}",
            rollout_id=rollout.rollout_id,
            number=number,
            started_at=time.time(),
            weights_version=self.weights_version(),
        )
        await self.store.begin_attempt(attempt)
        return await self._finish(attempt, rollout, replace(recording, sampling=_seeded(recording, seed)), waited)

    async def _finish(self, attempt: Attempt, rollout: Rollout, recording: Recording, waited: float) -> Attempt:
        """Run an attempt that is begun, from its start or from where an earlier process left it; commit it."""
        work = AttemptWork(
            attempt=attempt,
            rollout=rollout,
            task=self.tasks[rollout.task],
            sampling=recording.sampling,
            note=self.store.note if isinstance(self.rooms.sandboxes, AdoptingSandboxes) else None,
            adopt=self._adoptable.pop(attempt.attempt_id, None),
        )
        work.timings["queue"] = waited
        finished = await run_attempt(work, self.rooms)
        await self.store.commit(finished, self._samples(finished, rollout, work.calls, recording))
        return finished

    def _samples(
        self, attempt: Attempt, rollout: Rollout, calls: Sequence[ModelCall], recording: Recording
    ) -> SampleSet | None:
        """Samples of a graded attempt; of a failed one only when its partial calls are wanted."""
        if not isinstance(attempt.outcome, Verdict) and self.rooms.options.on_timeout is not OnTimeout.PARTIAL:
            return None
        trajectory = build(attempt.attempt_id, calls)
        return build_samples(
            trajectory,
            rollout=rollout,
            source=recording.source,
            policy=recording.policy or self.policy,
            weights_version=self.weights_version(),
        )


def failure_line(attempt: Attempt) -> str | None:
    """One line about an attempt that got no verdict, for people; None for any other."""
    outcome = attempt.outcome
    if not isinstance(outcome, Failure):
        return None
    return f"  {attempt.attempt_id}: {outcome.origin} failure: {outcome.message}"


def _seeded(recording: Recording, seed: int) -> Sampling:
    return msgspec.structs.replace(recording.sampling, seed=seed)


def _interrupted(attempt: Attempt) -> bool:
    return isinstance(attempt.outcome, Failure) and attempt.outcome.kind in OF_A_KILL


def _redrawn(seed: int, redraws: int) -> int:
    """The seed after so many discarded attempts: with the same one, a refill would only repeat what was discarded.

    An interrupted attempt is no draw: what a killed process had begun is done over as it was.
    """
    return (seed + 0x85EBCA6B * redraws) & 0x7FFFFFFF if redraws else seed
