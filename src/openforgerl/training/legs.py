"""Where a group's rollouts stand in the plan, when another trainer decides what is trained and when a run starts over.

veRL checkpoints every few steps, and TRL too. A run that is killed goes on from the last checkpoint, so it collects
some steps a second time: with the same weights only for the first of them. Rollouts that newer weights sampled belong
to a past that never was, and may not be handed out again under the same ids: a resumed run that finds such rollouts
starts a new leg, which is part of the purpose and so of every id. Finished attempts of the same leg are handed out
again.
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
    trainer: str
    """Its name, in the purpose of validation."""
    _seen: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])

    @classmethod
    async def resume(cls, store: RunStore, version: int, trainer: str) -> Legs:
        """The leg for a trainer whose weights are of `version`: the latest, or a new one if that went further."""
        legs = {
            rollout.rollout_id: leg
            for rollout in await store.rollouts()
            if (leg := _leg(rollout.purpose, trainer)) is not None
        }
        latest = max(legs.values(), default=0)
        ahead = any(
            attempt.weights_version > version and legs.get(attempt.rollout_id) == latest
            for attempt in await store.attempts()
        )
        return cls(latest + ahead, trainer)

    def place(self, step: int, task: Task) -> tuple[str, int]:
        """The purpose of the next group of `task` in `step`, and which group of this step and task it is.

        A trainer may ask for a task twice in a step, when its data begin anew or a dropped group is replaced; each is
        another group, and needs other seeds too.
        """
        again = self._seen[step, task.name]
        self._seen[step, task.name] += 1
        return (f"{TRAIN}:{self.leg}.{again}" if self.leg or again else TRAIN), again

    def validation(self, step: int) -> str:
        """The purpose of groups that only measure the weights of `step`."""
        return f"eval:{self.trainer}.{self.leg}.{step}"


def _leg(purpose: str, trainer: str) -> int | None:
    """`train` is of leg 0, `train:2.1` and `eval:verl.2.30` are of leg 2; None for what is not this trainer's."""
    kind, _, rest = purpose.partition(":")
    if kind == TRAIN:
        return int(rest.partition(".")[0] or 0)
    return int(rest.split(".")[1]) if purpose.startswith(f"eval:{trainer}.") else None
