"""slime as the trainer: its custom data source, rollout function and reward post-processing. The only door to slime.

::

    --data-source-path openforgerl.training.slime.TaskSource
    --rollout-function-path openforgerl.training.slime.generate_rollout
    --custom-reward-post-process-path openforgerl.training.slime.post_process_rewards
    --custom-config-path FILE    # openforgerl_config: grpo.toml, openforgerl_run: runs/slime

slime owns the loop and the SGLang servers; the orchestrator runs every rollout inside the harness and sandbox of the
config, against a proxy beside slime's router. Read in slime at commit 624b824 (2026-08-21): `slime/ray/rollout.py`,
`slime/rollout/{base_types,data_source}.py`, `slime/utils/types.py`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.types import Sample as SlimeSample

from openforgerl.config import load_config
from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.server_engine import SglangEngine
from openforgerl.errors import ConfigError, ExactnessError, TrainingError
from openforgerl.formats.trainers import SlimeForms
from openforgerl.training.algorithms import group_advantages
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.grpo import tasks_for_step
from openforgerl.training.rooms import HarnessGroups
from openforgerl.training.rows import GradedRollout, Group, graded
from openforgerl.types import Sampling


class TaskSource:
    """slime's data source: the tasks, and the open rooms that `generate_rollout` works in.

    The run folder is the state: a step whose rollouts were finished before a restart gets them from there.
    """

    def __init__(self, args: Any) -> None:
        """`args`: slime's, with `openforgerl_config` and `openforgerl_run` from its custom config file."""
        for name in ("openforgerl_config", "openforgerl_run"):
            if not getattr(args, name, ""):
                raise ConfigError(f"{name} is missing: put it into the file of slime's --custom-config-path")
        self.args = args
        self.config = load_config(GrpoConfig, Path(args.openforgerl_config), ())
        self.groups = HarnessGroups(self.config, Path(args.openforgerl_run), model=args.hf_checkpoint)
        self.tasks = list(self.groups.tasks.values())
        self._engine: SglangEngine | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    def collect(self, step: int, *, evaluation: bool) -> list[Group]:
        """The groups of 1-based step `step`, sampled with the weights that `step - 1` updates made. Blocking."""
        self._served().serves(step - 1)
        options, args = self.config.train, self.args
        tasks = self.tasks if evaluation else tasks_for_step(self.tasks, args.rollout_batch_size, options.seed, step)
        size = args.n_samples_per_eval_prompt if evaluation else args.n_samples_per_prompt
        sampling = Sampling(temperature=args.rollout_temperature)
        source = self.groups.source(sampling, purpose="eval" if evaluation else "train")

        async def groups() -> list[Group]:
            collecting = source.collect(tasks, group_size=size, weights_version=step - 1, step=step)
            return [group async for group in collecting]

        return self.groups.thread.wait(groups())

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """slime's other rollout functions ask for prompts; ours asks `collect`."""
        raise ConfigError(f"{num_samples} prompts asked for: use {__name__}.generate_rollout with this data source")

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Nothing is given back: what failed is refilled by the orchestrator."""
        if samples:
            raise ConfigError(f"use {__name__}.generate_rollout with this data source")

    def save(self, rollout_id: int) -> None:
        """Nothing: every finished attempt is in the run folder already."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing: see `save`."""

    def _served(self) -> SglangEngine:
        """slime's router as our engine; the rooms open at the first step, when the router is up."""
        if self._engine is None:
            args = self.args
            where = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
            options = EngineOptions(kind="sglang", path=where, model_name="policy", servers=self.config.engine.servers)
            engine = open_engine(None, self.groups.renderer, options)
            assert isinstance(engine, SglangEngine)
            self.groups.open(engine)
            self._engine = engine
        return self._engine


def generate_rollout(args: Any, rollout_id: int, data_source: TaskSource, evaluation: bool = False) -> Any:
    """slime's rollout function: for training a list of groups of samples, for evaluation a named table.

    A rollout that became several rows gives several samples with one `rollout_id`, so that slime's loss counts it
    once. Raises TrainingError when no group could be completed.
    """
    del args
    groups = data_source.collect(rollout_id + 1, evaluation=evaluation)
    if not groups:
        raise TrainingError(f"rollout {rollout_id}: no group could be completed; openforgerl show RUN --failed")
    forms, seeing = SlimeForms(data_source.groups.renderer.decode), data_source.groups.renderer.placeholders
    samples = [[sample for member in graded(group, seeing) for sample in _samples(member, forms)] for group in groups]
    if not evaluation:
        return samples
    rows = [sample for group in samples for sample in group]
    return {
        "openforgerl": {
            "rewards": [sample.reward for sample in rows],
            "truncated": [sample.status is SlimeSample.Status.TRUNCATED for sample in rows],
            "samples": rows,
        }
    }


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and advantages over each group's rollouts, each counted once.

    slime's own normalisation takes the statistics over rows, and over the whole batch as soon as groups differ in
    size: a rollout with many branches would outweigh the others.
    """
    normalise = bool(getattr(args, "grpo_std_normalization", True))
    rewards: dict[int, dict[int, float]] = {}
    for sample in samples:
        known = rewards.setdefault(sample.group_index, {}).setdefault(sample.rollout_id, sample.reward)
        if known != sample.reward:
            raise ExactnessError(f"rows of rollout {sample.rollout_id} differ in reward: {known} and {sample.reward}")
    advantages = {
        (group, rollout): value
        for group, by_rollout in rewards.items()
        for rollout, value in zip(
            by_rollout, group_advantages(list(by_rollout.values()), normalise_std=normalise).values, strict=True
        )
    }
    raw = [float(sample.reward) for sample in samples]
    return raw, [advantages[sample.group_index, sample.rollout_id] for sample in samples]


def _samples(member: GradedRollout, forms: SlimeForms) -> list[Any]:
    if any(row.images for row in member.rows):
        raise ConfigError(f"attempt {member.attempt.attempt_id} saw images, which cannot be given to slime yet")
    cut = member.verdict.ending.startswith("limit")
    return [
        SlimeSample.from_dict(forms.form(sample, task=member.rollout.task, reward=member.verdict.reward, truncated=cut))
        for sample in member.sampled
    ]
