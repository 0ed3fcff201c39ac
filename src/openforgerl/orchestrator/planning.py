"""Rollout ids and seeds: pure functions of the plan, so that a restarted run finds its own rows again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from openforgerl.types import Rollout, Task


def plan_rollouts(
    tasks: Sequence[Task],
    *,
    run_id: str,
    purpose: str,
    harness: str,
    per_task: int,
    seed: int,
    step: int = 0,
) -> list[list[Rollout]]:
    """One group of `per_task` rollouts for each task, in order.

    Ids are unique in a run as long as (purpose, step, task) is. The seed of a rollout depends neither on
    `run_id` nor on what follows a colon in `purpose`: `eval:sft` and `eval:rl` sample with the same seeds.
    """
    return [
        [
            Rollout(
                rollout_id=f"{_slug(purpose)}-{step}-{_slug(task.name)}-{index}",
                run_id=run_id,
                task=task.name,
                task_digest=task.digest,
                harness=harness,
                group_id=f"{_slug(purpose)}-{step}-{_slug(task.name)}",
                index=index,
                seed=_seed(seed, purpose.partition(":")[0], step, task.name, index),
                purpose=purpose,
                step=step,
            )
            for index in range(per_task)
        ]
        for task in tasks
    ]


def _slug(name: str) -> str:
    """Letters, digits and dashes only: ids become URL paths, directory names and pod names."""
    return "".join(char if char.isalnum() else "-" for char in name.lower()).strip("-")


def _seed(*parts: object) -> int:
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
