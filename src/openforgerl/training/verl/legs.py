"""Where a group's rollouts stand in the plan, when veRL decides what is trained and when a run starts over.

veRL checkpoints every few steps. A run that is killed goes on from the last checkpoint, so it collects some steps a
second time: with the same weights only for the first of them. Rollouts that newer weights sampled belong to a past
that never was, and may not be handed out again under the same ids: a resumed run that finds such rollouts starts a
new leg, which is part of the purpose and so of every id. Finished attempts of the same leg are handed out again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from openforgerl.store import RunStore
from openforgerl.types import Task

TRAIN = "train"


@dataclass(slots=True)
class Legs:
    """Purposes of this process's groups."""

    leg: int
    _seen: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])

    @classmethod
    async def resume(cls, store: RunStore, version: int) -> Legs:
        """The leg for a trainer whose weights are of `version`: the latest, or a new one if that went further."""
        purposes = {
            rollout.rollout_id: rollout.purpose
            for rollout in await store.rollouts()
            if rollout.purpose.partition(":")[0] == TRAIN
        }
        latest = max(map(_leg, purposes.values()), default=0)
        ahead = any(
            attempt.weights_version > version
            for attempt in await store.attempts()
            if attempt.rollout_id in purposes and _leg(purposes[attempt.rollout_id]) == latest
        )
        return cls(latest + ahead)

    def place(self, step: int, task: Task) -> tuple[str, int]:
        """The purpose of the next group of `task` in `step`, and which group of this step and task it is.

        veRL may ask for a task twice in a step, when its data begin anew or a dropped group is replaced; each is
        another group, and needs other seeds too.
        """
        again = self._seen[step, task.name]
        self._seen[step, task.name] += 1
        return (f"{TRAIN}:{self.leg}.{again}" if self.leg or again else TRAIN), again


def _leg(purpose: str) -> int:
    """`train` is leg 0, `train:2.1` is leg 2."""
    return int(purpose.partition(":")[2].partition(".")[0] or 0)
