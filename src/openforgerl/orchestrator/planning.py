"""Rollout ids and seeds: pure functions of the plan, so that a restarted run finds its own rows again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence

from openforgerl.types import Rollout, Task


def plan_rollouts(
    tasks: Sequence[Task],
    *,
    run_id: str,
    purpose: str,
    harness: str | Mapping[str, float],
    per_task: int,
    seed: int,
    step: int = 0,
) -> list[list[Rollout]]:
    """One group of `per_task` rollouts for each task, in order.

    `harness`: its name, or several with their weights, of which each group gets one, drawn by seed, step and task.

    Ids are unique in a run as long as (purpose, step, task) is. The seed of a rollout depends neither on
    `run_id` nor on what follows a colon in `purpose`: `eval:sft` and `eval:rl` sample with the same seeds.
    """
    return [
        [
            Rollout(
                rollout_id=f"{_slug(purpose)}-{step}-{task_slug(task)}-{index}",
                run_id=run_id,
                task=task.name,
                task_digest=task.digest,
                harness=_drawn(harness, _seed(seed, purpose.partition(":")[0], step, task.name, "harness")),
                group_id=f"{_slug(purpose)}-{step}-{task_slug(task)}",
                index=index,
                seed=_seed(seed, purpose.partition(":")[0], step, task.name, index),
                purpose=purpose,
                step=step,
            )
            for index in range(per_task)
        ]
        for task in tasks
    ]


def task_slug(task: Task) -> str:
    """A short name for ids: the last part of the task's name, and a digest of the whole so that none collide."""
    return f"{_slug(task.name.rpartition('/')[2])}-{hashlib.sha256(task.name.encode()).hexdigest()[:4]}"


def _drawn(harness: str | Mapping[str, float], seed: int) -> str:
    if isinstance(harness, str):
        return harness
    names = sorted(harness)
    return random.Random(seed).choices(names, [harness[name] for name in names])[0]


def _slug(name: str) -> str:
    """Letters, digits and dashes only: ids become URL paths, directory names and pod names."""
    return "".join(char if char.isalnum() else "-" for char in name.lower()).strip("-")


def _seed(*parts: object) -> int:
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
