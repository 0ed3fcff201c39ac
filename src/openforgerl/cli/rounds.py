"""One round of attempts on tasks, as `run` and `eval` need it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openforgerl.cli.configs import tokenizer_directory
from openforgerl.cli.models import chosen_words, open_renderer
from openforgerl.config import RoomsConfig, choose_tasks
from openforgerl.engines.opening import open_engine
from openforgerl.engines.relay import RelayEngine
from openforgerl.orchestrator import GroupResult, Recording, RunOptions, failure_line, plan_rollouts
from openforgerl.orchestrator.assembly import check_rooms, keep_tokenizer, open_house, open_run
from openforgerl.protocols import Progress
from openforgerl.types import Attempt, Rollout, Sampling, Source, Task, Verdict


@dataclass(frozen=True, slots=True)
class Round:
    """What a round gave."""

    tasks: Sequence[Task]
    rollouts: dict[str, Rollout]
    groups: Sequence[GroupResult]

    @property
    def last(self) -> list[Attempt]:
        """The last attempt of every rollout, in plan order."""
        return [attempt for group in self.groups for attempt in group.attempts]


async def run_round(
    folder: Path, config: RoomsConfig, run: RunOptions, purpose: str, attempts: int, progress: Progress
) -> Round:
    """Plan `attempts` rollouts per task and run them to their outcomes, from wherever the run folder stands."""
    tasks = choose_tasks(config)
    tokenizer = tokenizer_directory(config)
    renderer = open_renderer(tokenizer, config.proxy)
    check_rooms(config)
    async with contextlib.AsyncExitStack() as stack:
        # The engine before the folder: a script or model that cannot be opened must not become the run's config.
        engine = open_engine(None, renderer, config.engine)
        stack.push_async_callback(engine.close)
        opened = await stack.enter_async_context(open_run(folder, config))
        keep_tokenizer(folder, tokenizer)
        groups = [
            group
            for harness in config.harnesses
            for group in plan_rollouts(
                tasks,
                run_id=opened.run_id,
                # Seeds do not depend on what follows the colon: every harness gets the same draws.
                purpose=f"{purpose}:{harness}" if len(config.harnesses) > 1 else purpose,
                harness=harness,
                per_task=attempts,
                seed=config.seed,
            )
        ]
        source = Source.TEACHER if config.engine.kind in ("scripted", "relay") else Source.POLICY
        progress.say(chosen_words(renderer, config.proxy))
        progress.start(purpose, len(groups) * attempts)

        def on_attempt(rollout: Rollout, attempt: Attempt) -> None:
            if line := failure_line(attempt):
                progress.say(line)
            elif isinstance(attempt.outcome, Verdict):
                progress.advance(purpose, note=f"{rollout.task}: reward {attempt.outcome.reward:g}")

        async with open_house(
            opened,
            config,
            run,
            engine=engine,
            renderer=renderer,
            tasks={task.name: task for task in tasks},
            on_attempt=on_attempt,
        ) as house:
            done = [result async for result in house.orchestrator.run(groups, Recording(source, Sampling()))]
        progress.finish(purpose)
        if isinstance(engine, RelayEngine):
            progress.say(f"  relay to {config.engine.relay.model}: {engine.stats.line()}")
    order = {group[0].group_id: place for place, group in enumerate(groups)}
    done.sort(key=lambda result: order[result.rollouts[0].group_id])
    return Round(tasks, {rollout.rollout_id: rollout for group in groups for rollout in group}, done)
