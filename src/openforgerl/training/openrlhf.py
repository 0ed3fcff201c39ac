"""OpenRLHF as the trainer: an agent executor whose episodes run in a harness. The only door to OpenRLHF.

A file of yours, given as `--train.agent_func_path`, says which config and run folder::

    from openforgerl.training.openrlhf import agent_executor

    AgentExecutor = agent_executor("grpo.toml", "runs/openrlhf")

OpenRLHF owns the loop, the weights and the vLLM engines, and calls the executor inside each engine's Ray actor, once
for every sample of a prompt; a prompt's label names a task. The calls of one prompt are one group of the orchestrator.
OpenRLHF takes one sequence for an episode, so of a rollout that branched the row with most trained tokens stands for
it, and what is left out is logged. Every executor's process has a run folder of its own in the given one: OpenRLHF
says neither its step nor its weights' version, so nothing of an earlier process is handed out again.

Read in OpenRLHF 0.11.2: `openrlhf/utils/agent.py`, `openrlhf/trainer/ray/vllm_engine.py`,
`openrlhf/trainer/ppo_utils/samples_generator.py`.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from openforgerl.config import load_config
from openforgerl.errors import ConfigError, InputError, TrainingError
from openforgerl.formats.trainers import openrlhf_form
from openforgerl.training.borrowed import BorrowedEngine
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.rooms import HarnessGroups
from openforgerl.training.rows import GradedRollout, graded
from openforgerl.types import Sampling

LEFT_OUT = "openforgerl_trained_tokens_left_out"
"""Name of the logged number."""


def agent_executor(config: Path | str, run: Path | str) -> type[Any]:
    """The class that OpenRLHF looks for as `AgentExecutor`. `config`: a TOML file as for `openforgerl train grpo`."""

    class AgentExecutor(AgentExecutorBase):
        """Made by OpenRLHF without arguments, in the Ray actor of each vLLM engine."""

        def __init__(self) -> None:
            self.episodes = HarnessEpisodes(Path(config), Path(run))

        async def execute(
            self,
            prompt: str,
            label: str,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """One episode; see `HarnessEpisodes.execute`."""
            del hf_tokenizer
            if images:
                raise InputError(f"prompt {label!r} has images of its own; here a task's files are in its sandbox")
            return await self.episodes.execute(prompt, label, Asked(sampling_params, max_length, llm_engine))

    return AgentExecutor


@dataclass(frozen=True, slots=True)
class Asked:
    """How OpenRLHF asks for an episode, beside the task."""

    params: Any
    """vLLM's `SamplingParams`."""
    max_length: int
    engine: Any
    """The Ray actor's own object: `generate(prompt_token_ids, sampling_params, multi_modal_data)`."""


@dataclass(slots=True)
class _Answer:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class _Gathering:
    """A group whose members are still coming."""

    size: int = 0
    forms: asyncio.Task[list[dict[str, Any]]] | None = None


class HarnessEpisodes:
    """The rollouts of one vLLM engine of OpenRLHF's."""

    def __init__(self, config: Path, run: Path) -> None:
        folder = run / f"executor-{os.uname().nodename}-{os.getpid()}-{time.time_ns()}"
        self.groups = HarnessGroups(load_config(GrpoConfig, config, ()), folder)
        self._opening = asyncio.Lock()
        self._opened: tuple[Any, int] | None = None
        self._gathering: dict[tuple[str, float], _Gathering] = {}
        self._asked: Counter[str] = Counter()
        # Executors draw apart: one prompt may go to several of them, or to one in several lives.
        self._again = time.time_ns() % 2**31

    async def execute(self, prompt: str, label: str, asked: Asked) -> dict[str, Any]:
        """One episode of task `label`, as a member of the group that OpenRLHF asks for at once.

        Raises ConfigError for sampling that cannot be trained, InputError for a label that is no task, TrainingError
        when the group's refills ran out or nothing in the episode trains: OpenRLHF has no word for either, and stops.
        """
        sampling = _sampling(asked.params)
        if label not in self.groups.tasks:
            raise InputError(f"label {label!r} names no task of the config: give tasks' names as data.label_key")
        key = (label, sampling.temperature)
        group = self._gathering.get(key)
        if group is None:
            group = self._gathering[key] = _Gathering()
            group.forms = asyncio.create_task(self._gathered(key, prompt, sampling, asked))
        index = group.size
        group.size += 1
        assert group.forms is not None
        return (await asyncio.shield(group.forms))[index]

    async def _gathered(
        self, key: tuple[str, float], prompt: str, sampling: Sampling, asked: Asked
    ) -> list[dict[str, Any]]:
        """OpenRLHF starts the members of a group in one pass of the loop, so all of them are here before this runs."""
        size = self._gathering.pop(key).size
        return await self._group(prompt, key[0], sampling, asked, size)

    async def _group(
        self, prompt: str, label: str, sampling: Sampling, asked: Asked, size: int
    ) -> list[dict[str, Any]]:
        await self._open(asked)
        self._asked[label] += 1
        task, step = self.groups.tasks[label], self._asked[label]
        source = self.groups.source(sampling, again=self._again)

        async def collect() -> list[Any]:
            return [one async for one in source.collect([task], group_size=size, weights_version=0, step=step)]

        collected = await asyncio.wrap_future(self.groups.thread.begin(collect()))
        if not collected:
            raise TrainingError(
                f"a group of task {label} could not be completed: its refills ran out; see the attempts' failures "
                f"(openforgerl show {self.groups.rooms.folder.path} --failed)"
            )
        found = sorted(graded(collected[0], self.groups.renderer.placeholders), key=lambda one: one.rollout.index)
        return [_form(member, prompt, label, logged=asked.params.logprobs is not None) for member in found]

    async def _open(self, asked: Asked) -> None:
        """Serve OpenRLHF's engine behind the proxy, at the first episode: before it, vLLM is not up."""
        async with self._opening:
            if self._opened is None:
                engine = BorrowedEngine(
                    _Generate(asked.engine, type(asked.params), asyncio.get_running_loop()),
                    context_length=asked.max_length,
                    stop_ids=self.groups.renderer.stop_ids,
                    owner="OpenRLHF",
                )
                await asyncio.to_thread(self.groups.open, engine)
                self._opened = (asked.engine, asked.max_length)
            if self._opened != (asked.engine, asked.max_length):
                raise ConfigError(f"data.max_len changed from {self._opened[1]} to {asked.max_length} in one process")


class _Generate:
    """OpenRLHF's engine as `borrowed.Generate`. vLLM belongs to the actor's event loop; rollouts run on another."""

    def __init__(self, engine: Any, params: type[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._params = params
        self._loop = loop

    async def __call__(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
    ) -> _Answer:
        del request_id  # OpenRLHF's engine is one replica
        # Ours end an answer, and nothing else does; the log-prob of the sampled id comes with 0 further ones.
        params = self._params(**(sampling_params | {"logprobs": 0, "ignore_eos": True, "skip_special_tokens": False}))
        shown = {"image": image_data} if image_data else None
        asking = self._engine.generate(prompt_ids, params, multi_modal_data=shown)
        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        said = output.outputs[0]
        ids = list(said.token_ids)
        log_probs = [float(known[id].logprob) for id, known in zip(ids, said.logprobs or (), strict=True)]
        return _Answer(ids, log_probs, "aborted" if said.finish_reason == "abort" else said.finish_reason)


def _form(member: GradedRollout, prompt: str, label: str, *, logged: bool) -> dict[str, Any]:
    """The row that stands for a rollout, as OpenRLHF's episode."""
    if not member.row.trained_tokens:
        raise TrainingError(
            f"nothing in attempt {member.attempt.attempt_id} trains, and OpenRLHF divides by the number of trained "
            "tokens of every episode; see why with openforgerl show"
        )
    if member.row.images:
        raise InputError(f"attempt {member.attempt.attempt_id} saw images, which cannot be given to OpenRLHF yet")
    sample = next(sample for sample in member.samples if sample.sample_id == member.row.sample_id)
    cut = member.verdict.ending.startswith("limit")
    form = openrlhf_form(sample, prompt=prompt, label=label, verdict=member.verdict, truncated=cut)
    if not logged:  # OpenRLHF then corrects nothing, and takes no log-probs
        form["rollout_log_probs"] = None
    form["extra_logs"] = {LEFT_OUT: float(member.left_out)}
    return form | {"images": None, "mm_train_inputs": None}


def _sampling(params: Any) -> Sampling:
    """The sampling that OpenRLHF's loss takes for granted."""
    top_k = max(0, params.top_k)
    if params.top_p != 1 or top_k:
        raise ConfigError(
            f"top_p is {params.top_p} and top_k {params.top_k}; leave them at 1 and -1: log-probs of a changed "
            "distribution are not the policy's, and nothing could be trained"
        )
    if params.temperature != 1 and params.logprobs is None:
        raise ConfigError(
            f"rollout.temperature is {params.temperature}: then vLLM's log-probs are the policy's only with "
            "--algo.advantage.is_correction_level token (or another than off)"
        )
    return Sampling(temperature=float(params.temperature))
