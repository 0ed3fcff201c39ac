"""Which attempts of a run are exported: graded ones, the last of each rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator

from openforgerl.errors import InputError
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
        self.without_samples: list[str] = []
        """Graded attempts without samples, by id."""

    async def records(self) -> AsyncGenerator[AttemptRecord]:
        """The selected attempts in order of planning. Failures have no reward and are never among them.

        Raises InputError when the run has no rollouts of the chosen purpose.
        """
        rollouts = await self._store.rollouts()
        purposes = dict.fromkeys(rollout.purpose for rollout in rollouts)
        if self._purpose is not None and self._purpose not in purposes:
            known = ", ".join(purposes) or "none"
            raise InputError(f"the run has no rollouts of purpose {self._purpose!r}; it has {known}")
        attempts: dict[str, list[Attempt]] = {}
        for attempt in await self._store.attempts():
            attempts.setdefault(attempt.rollout_id, []).append(attempt)
        for rollout in rollouts:
            if self._purpose is not None and rollout.purpose != self._purpose:
                continue
            begun = attempts.get(rollout.rollout_id, [])
            if not begun:
                self.left_out["planned, never begun"] += 1
                continue
            attempt = begun[-1]
            if len(begun) > 1:
                self.left_out["failed and tried again"] += len(begun) - 1
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
            self.without_samples.append(attempt.attempt_id)
            return None
        calls = await self._store.calls(attempt.attempt_id)
        return AttemptRecord(rollout=rollout, attempt=attempt, verdict=outcome, calls=tuple(calls), samples=samples)
