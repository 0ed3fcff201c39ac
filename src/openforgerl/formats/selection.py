"""Which attempts of a run are exported: graded ones, the last of each rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator

from openforgerl.formats.records import AttemptRecord
from openforgerl.store import RunStore
from openforgerl.types import Attempt, Failure, Rollout, Verdict


class Selection:
    """Graded attempts of a run, one at a time: a long run does not fit into memory with all its calls."""

    def __init__(self, store: RunStore, *, purpose: str | None = None, only_passed: bool = False) -> None:
        self._store = store
        self._purpose = purpose
        self._only_passed = only_passed
        self.left_out: Counter[str] = Counter()
        """Why attempts are not among the records → how many."""

    async def records(self) -> AsyncGenerator[AttemptRecord]:
        """The selected attempts in order of planning. Failures have no reward and are never among them."""
        last: dict[str, Attempt] = {}
        for attempt in await self._store.attempts():
            if attempt.rollout_id in last:
                self.left_out["failed and tried again"] += 1
            last[attempt.rollout_id] = attempt
        for rollout in await self._store.rollouts(self._purpose):
            attempt = last.get(rollout.rollout_id)
            if attempt is None:
                self.left_out["planned, never begun"] += 1
                continue
            record = await self._record(rollout, attempt)
            if record is not None:
                yield record

    async def _record(self, rollout: Rollout, attempt: Attempt) -> AttemptRecord | None:
        outcome = attempt.outcome
        if not isinstance(outcome, Verdict):
            self.left_out["failed" if isinstance(outcome, Failure) else "unfinished"] += 1
            return None
        if self._only_passed and not outcome.passed:
            self.left_out["not passed"] += 1
            return None
        samples = (await self._store.samples([attempt.attempt_id])).get(attempt.attempt_id)
        if samples is None:
            self.left_out["graded without samples"] += 1
            return None
        calls = await self._store.calls(attempt.attempt_id)
        return AttemptRecord(rollout=rollout, attempt=attempt, verdict=outcome, calls=tuple(calls), samples=samples)
