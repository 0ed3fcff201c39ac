"""GRPO on this machine, assembled: torch engine, proxy, orchestrator and loop around one run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openforgerl.config import RoomsConfig
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.orchestrator import OrchestratedGroups, Recording, RunOptions
from openforgerl.orchestrator.assembly import RunFolder, open_house
from openforgerl.protocols import Renderer
from openforgerl.training.grpo import GrpoLoop, StepReport
from openforgerl.training.learner import Learner
from openforgerl.training.options import GrpoOptions
from openforgerl.training.served import ServedProbe
from openforgerl.types import Attempt, Rollout, Sampling, Source, Task

METRICS = "metrics.jsonl"
"""One line for each recorded step, in the run folder."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a caller wants to hear of while training runs."""

    attempt: Callable[[Rollout, Attempt], None] = lambda rollout, attempt: None
    step: Callable[[StepReport], None] = lambda report: None


async def reinforce(
    folder: RunFolder,
    config: RoomsConfig,
    run: RunOptions,
    options: GrpoOptions,
    *,
    start: Path,
    tasks: Sequence[Task],
    renderer: Renderer,
    watch: Watch,
) -> Path:
    """Train the model directory `start` on `tasks` inside the harness that `config` names; the last checkpoint.

    The served weights are a copy of the learner's, replaced after every step. Resumes from the run folder.
    """
    engine = TorchEngine(start, model_name="policy", options=config.engine)
    try:
        async with open_house(
            folder,
            config,
            run,
            engine=engine,
            renderer=renderer,
            tasks={task.name: task for task in tasks},
            on_attempt=watch.attempt,
        ) as house:
            source = OrchestratedGroups(
                orchestrator=house.orchestrator,
                recording=Recording(Source.POLICY, Sampling()),
                run_id=folder.run_id,
                harness=config.harnesses,
                seed=config.seed,
            )
            learner = Learner(start, options.learner, planned_steps=options.steps)
            limit = options.served_difference or (1e-3 if config.engine.dtype == "float32" else 0.05)
            loop = GrpoLoop(
                learner=learner,
                source=source,
                engine=engine,
                store=folder.store,
                tasks=tasks,
                options=msgspec.structs.replace(options, seed=options.seed + config.seed),
                directory=folder.path,
                companions=start,
                probe=ServedProbe(engine, learner, limit),
            )

            def on_step(report: StepReport) -> None:
                with metrics.open("ab") as lines:
                    lines.write(msgspec.json.encode(report) + b"\n")
                watch.step(report)

            # The store is the record; the file is for people and tools, so it is made anew from it on every start.
            metrics = folder.path / METRICS
            recorded = await folder.store.steps(loop.stage)
            metrics.write_bytes(b"".join(msgspec.json.encode(step.metrics) + b"\n" for step in recorded))
            return await loop.run(on_step)
    finally:
        await engine.close()
