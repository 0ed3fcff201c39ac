"""The `GroupSource` of the orchestrator: what the embedded loop and veRL both consume."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from openforgerl.orchestrator.planning import plan_rollouts
from openforgerl.orchestrator.runs import GroupResult, Orchestrator, Recording
from openforgerl.trajectory import mask_stale
from openforgerl.types import Attempt, Rollout, Sample, Task


@dataclass(slots=True)
class OrchestratedGroups:
    """Collects complete groups for one optimizer step. A group whose refills ran out is dropped and counted."""

    orchestrator: Orchestrator
    recording: Recording
    run_id: str
    harness: str | Mapping[str, float]
    """Its name, or several with weights: each group gets one."""
    seed: int
    purpose: str = "train"
    on_group: Callable[[GroupResult], None] = lambda group: None

    async def collect(
        self, tasks: Sequence[Task], *, group_size: int, weights_version: int, step: int
    ) -> AsyncIterator[Sequence[tuple[Rollout, Attempt, Sequence[Sample]]]]:
        """Yield every complete group, in plan order, so that the batch does not depend on which came first.

        Attempts of this step that an earlier process finished are taken from the store, not run again. What was fresh
        enough when its attempt ended may be stale by now: it is masked against `weights_version`.
        """
        groups = plan_rollouts(
            tasks,
            run_id=self.run_id,
            purpose=self.purpose,
            harness=self.harness,
            per_task=group_size,
            seed=self.seed,
            step=step,
        )
        results: dict[str, GroupResult] = {}
        async for result in self.orchestrator.run(groups, self.recording):
            self.on_group(result)
            results[result.rollouts[0].group_id] = result
        for group in groups:
            result = results[group[0].group_id]
            if result.dropped:
                continue
            samples = await self.orchestrator.store.samples([attempt.attempt_id for attempt in result.attempts])
            limit = (self.recording.policy or self.orchestrator.policy).max_staleness
            yield [
                (rollout, attempt, mask_stale(samples[attempt.attempt_id].samples, weights_version, limit))
                for rollout, attempt in zip(result.rollouts, result.attempts, strict=True)
            ]
