"""The demo, start to end: teach, fine-tune, reinforce, measure. Every stage resumes from the run folder.

Nothing here is special to the demo but its sizes: the same rooms serve any model, harness and task directory.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from openforgerl.demo.settings import DemoConfig
from openforgerl.demo.teacher import Teacher
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import InputError
from openforgerl.orchestrator import GroupResult, Recording, failure_line, plan_rollouts, task_slug
from openforgerl.orchestrator.assembly import House, RunFolder, open_house
from openforgerl.protocols import InferenceEngine, Progress, Renderer
from openforgerl.rendering import load_renderer
from openforgerl.tasks import read_tasks
from openforgerl.training.grpo import StepReport
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import StepMetrics
from openforgerl.training.reinforcing import Watch, reinforce
from openforgerl.training.sft import SftResult, ValidationPoint, train_sft
from openforgerl.types import Attempt, Rollout, Sample, Sampling, Source, Task, Verdict

HELD_OUT_SPLITS = ("heldout", "heldout-phrasing", "heldout-family")
TEACHER, TRAIN = "teacher", "train"
STAGES = ("untrained", "sft", "rl")
SECONDS = "seconds_by_stage"
"""Key in the store under which the time of finished stages is kept over restarts."""
MODEL_NAME = "policy"


def demo_tasks() -> list[Task]:
    """The bundled tasks, all splits."""
    return read_tasks(Path(str(files("openforgerl.demo") / "tasks")))


def base_model() -> Path:
    """Directory of the shipped base checkpoint."""
    return Path(str(files("openforgerl.demo") / "base"))


def start_model(config: DemoConfig) -> Path:
    """Directory that the run starts from: the one that was asked for, else the shipped one. InputError when absent."""
    if config.demo.model is None:
        return base_model()
    chosen = Path(config.demo.model)
    if not (chosen / "config.json").is_file():
        raise InputError(f"demo.model: {chosen} is no model directory: config.json is missing")
    return chosen


def lengthened_model(directory: Path, context_length: int) -> Path:
    """The shipped base checkpoint with another context length, written to `directory` unless it is there."""
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        for file in base_model().iterdir():
            if file.name not in ("config.json", "SHA256SUMS"):
                shutil.copyfile(file, directory / file.name)
        config = json.loads((base_model() / "config.json").read_text())
        # Written last: where it stands, the rest does too.
        text = json.dumps(config | {"max_position_embeddings": context_length}, indent=2)
        (directory / "config.json").write_text(text + "\n")
    return directory


@dataclass(slots=True)
class Demo:
    """One demo run in one run folder."""

    folder: RunFolder
    config: DemoConfig
    progress: Progress
    tasks: Sequence[Task] = field(default_factory=demo_tasks)
    base: Path = field(init=False)
    """The model that everything starts from."""
    renderer: Renderer = field(init=False)

    def __post_init__(self) -> None:
        length = self.config.demo.context_length
        self.base = start_model(self.config)
        if length is not None:
            self.base = lengthened_model(self.folder.path / "base", length)
        self.renderer = load_renderer(self.base)

    async def run(self) -> None:
        """All stages in order. Each leaves its attempts in the store, so that a restart skips what is done."""
        await self.teach()
        # The last checkpoint, not the one of lowest validation loss: late in SFT the few tokens still wrong cost ever
        # more nats while ever more tokens are right, and what counts here is whole commands (accuracy in the curve).
        tuned = (await self.fine_tune()).last
        await self.measure("untrained", self.base)
        await self.measure("sft", tuned)
        trained = await self.reinforce(tuned)
        await self.measure("rl", trained)

    async def teach(self) -> None:
        """The scripted expert acts in the harness; each task several times (the paper's recipe)."""
        options = self.config.demo
        taught = [*self.shown(), *self._chosen("validation")[: options.validation_tasks]]
        by_slug = {task_slug(task): task for task in taught}
        engine = ScriptedEngine(Teacher(by_slug, self.config.harness.name), self.renderer, model_name=MODEL_NAME)
        groups = self._plan(taught, TEACHER, options.teacher_rollouts)
        async with self._stage("teacher", sum(map(len, groups))), self._house(engine) as house:
            await self._collect("teacher", house, groups, Recording(Source.TEACHER, Sampling()))

    async def fine_tune(self) -> SftResult:
        """SFT on the teacher's successes; validated on tasks of their own."""
        train, validation = await self._successes(self.shown()), await self._successes(self._chosen("validation"))
        options = self.config.sft
        learner = Learner(self.base, options.learner, planned_steps=options.steps)

        def on_step(metrics: StepMetrics, point: ValidationPoint | None) -> None:
            note = None if point is None else f"validation loss {point.loss:.3f}"
            self.progress.advance("SFT", note=note)

        async with self._stage("SFT", options.steps):
            return train_sft(
                learner,
                train,
                validation,
                options,
                directory=self.folder.path / "checkpoints" / "sft",
                companions=self.base,
                on_step=on_step,
            )

    async def reinforce(self, start: Path) -> Path:
        """GRPO from the SFT checkpoint, every rollout inside the harness; the last checkpoint."""
        options = self.config.train
        total = options.steps * options.groups_per_step * options.group_size

        def on_step(report: StepReport) -> None:
            note = f"step {report.step}/{options.steps}, mean reward {report.reward_mean:.2f}"
            self.progress.advance("GRPO", report.rollouts, note=note)

        async with self._stage("GRPO", total):
            return await reinforce(
                self.folder,
                self.config,
                self.config.run,
                options,
                start=start,
                tasks=self.practised(),
                renderer=self.renderer,
                watch=Watch(self._report_failure, on_step),
            )

    async def measure(self, stage: str, model: Path) -> None:
        """Attempts on held-out tasks: the same tasks, seeds and sampling for every stage."""
        options = self.config.demo
        groups = self._plan(self.held_out(), f"eval:{stage}", options.eval_attempts)
        name = f"measure {stage}"
        async with self._stage(name, sum(map(len, groups))), self._house(self._engine(model)) as house:
            await self._collect(name, house, groups, Recording(Source.POLICY, Sampling()))

    def shown(self) -> list[Task]:
        """Tasks that the teacher shows for SFT."""
        lent = [task for place, task in self._by_family("rl") if place < self.config.demo.lent_per_family]
        return [*self._chosen("sft")[: self.config.demo.sft_tasks], *lent]

    def practised(self) -> list[Task]:
        """Tasks that GRPO trains on; none of them is shown before."""
        return [task for place, task in self._by_family("rl") if place >= self.config.demo.lent_per_family]

    def held_out(self) -> list[Task]:
        """Tasks no training stage ever sees."""
        return [task for split in HELD_OUT_SPLITS for task in self._measured(split)]

    def _split(self, name: str) -> list[Task]:
        return [task for task in self.tasks if task.metadata.get("split") == name]

    def _chosen(self, split: str) -> list[Task]:
        """Tasks of `split` that are of the chosen families."""
        families = self.config.demo.families
        return [task for task in self._split(split) if not families or task.metadata.get("family") in families]

    def _by_family(self, split: str) -> list[tuple[int, Task]]:
        """Chosen tasks of `split`, each with its place (from 0) among those of its family."""
        seen: Counter[object] = Counter()
        places: list[tuple[int, Task]] = []
        for task in self._chosen(split):
            family = task.metadata.get("family")
            places.append((seen[family], task))
            seen[family] += 1
        return places

    def _measured(self, split: str) -> list[Task]:
        """The first tasks of `split`, so many in all and of each family as the options say."""
        options = self.config.demo
        most = options.eval_per_family
        return [task for place, task in self._by_family(split) if most is None or place < most][: options.eval_tasks]

    def _plan(self, tasks: Sequence[Task], purpose: str, per_task: int) -> list[list[Rollout]]:
        return plan_rollouts(
            tasks,
            run_id=self.folder.run_id,
            purpose=purpose,
            harness=self.config.harness.name,
            per_task=per_task,
            seed=self.config.seed,
        )

    def _engine(self, model: Path) -> TorchEngine:
        return TorchEngine(model, model_name=MODEL_NAME, options=self.config.engine)

    @asynccontextmanager
    async def _house(self, engine: InferenceEngine) -> AsyncGenerator[House]:
        try:
            async with open_house(
                self.folder,
                self.config,
                self.config.run,
                engine=engine,
                renderer=self.renderer,
                tasks={task.name: task for task in self.tasks},
                on_attempt=self._report_failure,
            ) as house:
                yield house
        finally:
            await engine.close()

    def _report_failure(self, rollout: Rollout, attempt: Attempt) -> None:
        if line := failure_line(attempt):
            self.progress.say(line)

    async def _collect(
        self, stage: str, house: House, groups: Sequence[Sequence[Rollout]], recording: Recording
    ) -> None:
        """Run groups to their end. InputError when a group got no verdict in spite of all refills."""
        results: list[GroupResult] = []
        async for result in house.orchestrator.run(groups, recording):
            results.append(result)
            attempts = [attempt for group in results for attempt in group.attempts]
            passed = sum(isinstance(a.outcome, Verdict) and a.outcome.passed for a in attempts)
            self.progress.advance(stage, len(result.rollouts), note=f"{passed} of {len(attempts)} solved")
        lost = [result.rollouts[0].task for result in results if result.dropped]
        if lost:
            raise InputError(f"{stage}: no verdict for {', '.join(lost[:5])} after all refills; see the failures above")

    async def _successes(self, tasks: Sequence[Task]) -> list[Sample]:
        """Samples of the teacher's solved attempts on `tasks`."""
        names = {task.name for task in tasks}
        rollouts = {r.rollout_id for r in await self.folder.store.rollouts(purpose=TEACHER) if r.task in names}
        solved = [
            attempt.attempt_id
            for attempt in await self.folder.store.attempts()
            if attempt.rollout_id in rollouts and isinstance(attempt.outcome, Verdict) and attempt.outcome.passed
        ]
        found = await self.folder.store.samples(solved)
        return [sample for attempt_id in solved for sample in found[attempt_id].samples]

    @asynccontextmanager
    async def _stage(self, name: str, total: int) -> AsyncGenerator[None]:
        """Progress and time of one stage; the time of a stage that was killed counts from its last start."""
        self.progress.start(name, total)
        started = time.monotonic()
        yield
        spent: dict[str, float] = await self.folder.store.value(SECONDS) or {}
        if name not in spent:
            spent[name] = round(time.monotonic() - started, 1)
            await self.folder.store.put_value(SECONDS, spent)
        self.progress.finish(name)
