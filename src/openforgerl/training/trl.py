"""TRL as the trainer: the rollout function of its `GRPOTrainer` (`rollout_func`), and the reward that goes with it.

::

    rollouts = HarnessRollouts("grpo.toml", "runs/trl")
    trainer = GRPOTrainer(
        model=..., args=GRPOConfig(...), train_dataset=Dataset.from_list(rollouts.prompts),
        reward_funcs=verdict_reward, rollout_func=rollouts,
    )

TRL owns the loop and the weights; every rollout runs inside the harness and sandbox of the config, against a proxy in
front of the config's engine, which gets TRL's weights before each collection that follows an update. TRL trains one
sequence for a rollout, so of one that branched the row with most trained tokens stands for it, and what is left out is
counted. Read in TRL 1.16.0, `trl/trainer/grpo_trainer.py`; nothing of TRL is imported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from openforgerl.config import load_config
from openforgerl.engines.opening import open_engine
from openforgerl.errors import ConfigError, InputError, TrainingError
from openforgerl.protocols import InferenceEngine, WeightControl
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.legs import Legs
from openforgerl.training.rooms import HarnessGroups
from openforgerl.training.rows import GradedRollout, Group, Row, graded
from openforgerl.training.served import check_difference, check_version
from openforgerl.types import Sampling, Task

REWARD, LEFT_OUT = "openforgerl_reward", "openforgerl_left_out"
"""Columns beside the rows, which TRL hands to the reward function."""
_NEUTRAL = {"top_p": (1.0, None), "top_k": (0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
"""Sampling that changes nothing: with any other the recorded log-probs would not be the policy's."""

log = logging.getLogger(__name__)


class HarnessRollouts:
    """Give it to `GRPOTrainer` as `rollout_func`. Close it when training is over."""

    def __init__(self, config: Path | str, run: Path | str) -> None:
        """`config`: a TOML file as for `openforgerl train grpo`; of `[train]` only `served_difference` is read.
        `run`: the run folder, which holds every attempt and call."""
        self._config = load_config(GrpoConfig, Path(config), ())
        self._groups = HarnessGroups(self._config, Path(run))
        self._folder = Path(run)
        self._engine: InferenceEngine | None = None
        self._legs: Legs | None = None
        self._loaded: int | None = None

    @property
    def prompts(self) -> list[dict[str, str]]:
        """Rows for TRL's dataset: a prompt is a task's name. What the model sees is the harness's business."""
        return [{"prompt": name} for name in self._groups.tasks]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """`rollout_func`: one row for each of `prompts`, which name every task as often as its group is large.

        A group whose refills ran out comes as rows in which nothing trains, without a reward: TRL leaves such rows
        out of every statistic. Raises TrainingError when no group at all could be completed, and when what was
        sampled does not agree with the weights that TRL has.
        """
        training = bool(trainer.model.training)
        size = int(trainer.num_generations if training else trainer.num_generations_eval)
        version = int(trainer.state.global_step)
        sampling = _sampling(trainer)
        names = _groups_in(prompts, size, self._groups.tasks)
        self._publish(trainer, version)
        groups = self._groups.thread.wait(self._collect(names, size, version, sampling, training))
        rows = [row for group in groups for row in self._rows(group, size)]
        if all(reward is None for _, reward, _ in rows):
            raise TrainingError(
                f"update {version}: no group could be completed for {', '.join(sorted(set(names)))}; see the "
                f"attempts' failures (openforgerl show {self._folder} --failed), repair the cause and resume"
            )
        self._check(trainer, [row for row, _, _ in rows], sampling.temperature, version)
        return {
            "prompt_ids": [list(row.prompt_ids) for row, _, _ in rows],
            "completion_ids": [list(row.response_ids) for row, _, _ in rows],
            "logprobs": [list(row.response_logprobs) for row, _, _ in rows],
            "env_mask": [list(row.response_mask) for row, _, _ in rows],
            REWARD: [reward for _, reward, _ in rows],
            LEFT_OUT: [left_out for _, _, left_out in rows],
        }

    def close(self) -> None:
        """Stop what is in flight, close the rooms and the engine. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._groups.thread.wait(engine.close())
        self._groups.close()

    def _publish(self, trainer: Any, version: int) -> None:
        """The engine, opened at the first call, samples with the trainer's weights from here on."""
        if trainer.accelerator.num_processes != 1:
            raise ConfigError("TRL runs in several processes; openforgerl.training.trl gives rollouts to one only")
        if self._engine is None:
            named = msgspec.structs.replace(self._config.engine, model_name=self._config.engine.model_name or "policy")
            engine: Any = open_engine(None, self._groups.renderer, named)
            if not isinstance(engine, WeightControl) or not isinstance(engine, InferenceEngine):
                raise ConfigError(f"engine.kind {named.kind!r} takes no weights, so it cannot serve what TRL trains")
            self._groups.open(engine)
            self._engine = engine
            self._legs = self._groups.thread.wait(Legs.resume(self._groups.rooms.folder.store, version, "trl"))
        if self._loaded != version:
            model = trainer.accelerator.unwrap_model(trainer.model)
            if hasattr(model, "peft_config"):
                raise ConfigError("TRL trains an adapter; openforgerl.training.trl serves whole models only")
            self._groups.thread.wait(self._load(model, version))
            self._loaded = version

    async def _load(self, model: Any, version: int) -> None:
        engine = cast(WeightControl, self._engine)
        weights: Any = model.state_dict()
        if self._config.engine.kind != "torch":  # servers read a directory
            weights = self._folder / "weights" / f"step-{version:06d}"
            await asyncio.to_thread(model.save_pretrained, weights)
        await engine.pause()
        try:
            await engine.load(weights, version)
        finally:
            await engine.resume()

    async def _collect(
        self, names: Sequence[str], size: int, version: int, sampling: Sampling, training: bool
    ) -> list[tuple[Task, Group | None]]:
        """Every group, in order; None for one that was dropped."""
        assert self._legs is not None
        legs, step = self._legs, version + 1

        async def one(task: Task) -> Group | None:
            purpose, again = legs.place(step, task) if training else (legs.validation(version), 0)
            source = self._groups.source(sampling, purpose=purpose, again=again)
            found = source.collect([task], group_size=size, weights_version=version, step=step)
            return next(iter([group async for group in found]), None)

        tasks = [self._groups.tasks[name] for name in names]
        found = await asyncio.gather(*map(one, tasks))
        return list(zip(tasks, found, strict=True))

    def _rows(self, collected: tuple[Task, Group | None], size: int) -> list[tuple[Row, float | None, int]]:
        """Row, reward and tokens left out of every rollout of a group, in the rollouts' order."""
        task, group = collected
        if group is None:
            log.warning("the group of task %s was dropped: its refills ran out", task.name)
            return [(Row("", (0,), (0,), (0,), (0.0,), (0, 0)), None, 0)] * size
        members: list[GradedRollout] = graded(group, self._groups.renderer.placeholders)
        for member in members:
            if any(row.images for row in member.rows):
                raise InputError(f"attempt {member.attempt.attempt_id} saw images; TRL takes none from a rollout_func")
        members.sort(key=lambda member: member.rollout.index)
        return [(member.row, member.verdict.reward, member.left_out) for member in members]

    def _check(self, trainer: Any, rows: Sequence[Row], temperature: float, version: int) -> None:
        """The shortest row that trains, scored with the weights that TRL has. TrainingError when they are others."""
        row = min((row for row in rows if row.trained_tokens), key=_length, default=None)
        if row is None:
            return
        check_version(f"row {row.sample_id}", *row.versions, version)
        model = trainer.accelerator.unwrap_model(trainer.model)
        scored = _scored(model, row, temperature)
        pairs = zip(scored, row.response_logprobs, row.response_mask, strict=True)
        differences = [abs(ours - recorded) for ours, recorded, trained in pairs if trained]
        mean = sum(differences) / len(differences)
        exact = self._config.engine.kind == "torch" and {self._config.engine.dtype, str(model.dtype)[6:]} == {"float32"}
        limit = self._config.train.served_difference or (1e-3 if exact else 0.05)
        check_difference(mean, max(differences), version, limit=limit)


def verdict_reward(*, log_metric: Callable[[str, float], None] | None = None, **columns: Any) -> list[float | None]:
    """TRL's reward function for these rollouts: what the verifiers said. None belongs to a dropped group."""
    if REWARD not in columns:
        raise ConfigError(f"{REWARD} is missing: verdict_reward goes with HarnessRollouts as rollout_func")
    left_out: list[int] = columns[LEFT_OUT]
    if log_metric is not None:
        log_metric("openforgerl/trained_tokens_left_out", float(sum(left_out)))
    return columns[REWARD]


def _sampling(trainer: Any) -> Sampling:
    """The sampling that TRL's loss takes for granted: its temperature and nothing else."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(trainer.args, name, None)
        if value not in neutral:
            raise ConfigError(
                f"GRPOConfig.{name} is {value}; leave it at {neutral[0]}: log-probs of a changed distribution are not "
                "the policy's, and nothing could be trained"
            )
    return Sampling(temperature=float(trainer.args.temperature))


def _groups_in(prompts: Sequence[str], size: int, tasks: dict[str, Task]) -> list[str]:
    """The task of every group. InputError when the prompts are no whole groups or name no task."""
    chunks = [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    for chunk in chunks:
        if len(chunk) != size or set(chunk) != {chunk[0]}:
            raise InputError(f"TRL asks for {chunk}, which is no whole group of {size}; set no sampler of your own")
        if chunk[0] not in tasks:
            raise InputError(f"prompt {chunk[0]!r} names no task of the config; take HarnessRollouts.prompts as data")
    return [chunk[0] for chunk in chunks]


def _length(row: Row) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def _scored(model: Any, row: Row, temperature: float) -> list[float]:
    """log-probs of the response under `model`, at the sampling temperature."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]], device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].float() / temperature
    finally:
        model.train(was_training)
    chosen = ids[0, len(row.prompt_ids) :, None]
    return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].tolist()
