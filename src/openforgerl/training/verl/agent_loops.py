"""veRL's agent-loop manager whose agents are real harnesses (`rollout.agent.agent_loop_manager_class`).

veRL owns the loop. It asks for groups by putting prompts into `generate_sequences`, and finds what came of them in
its TransferQueue. Here a prompt names a task; the orchestrator runs the group in the harness and sandbox of the
run's config, against a proxy that stands beside veRL's `LLMServerClient`. What failed is refilled by the orchestrator;
a group that cannot be completed is put as `failure` with no row, so that veRL evicts it and asks for another.

Contracts: veRL 0.9 `trainer/main_ppo.py` (create, generate_sequences), `trainer/ppo/v1/replay_buffer.py` (keys, tags)
and `trainer/ppo/v1/agent_loop_tq.py` (fields of a row).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import LLMServerClient

from openforgerl.errors import TrainingError
from openforgerl.protocols import GroupSource
from openforgerl.training.borrowed import BorrowedEngine
from openforgerl.training.legs import Legs
from openforgerl.training.rooms import HarnessGroups
from openforgerl.training.rows import Group, Row, graded
from openforgerl.training.verl.runs import read_config
from openforgerl.training.verl.seen import SeenImages
from openforgerl.types import Sampling, Task, Verdict

log = logging.getLogger(__name__)


class AgentLoops:
    """Implements what veRL's trainer calls of its agent-loop manager."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        """`config`: veRL's; `openforgerl.run` in it is the run folder. Opens the rooms and serves the proxy."""
        rollout = config.actor_rollout_ref.rollout
        folder = Path(config.openforgerl.run)
        self._config = read_config(folder)
        self._rollout = rollout
        self._sync = config.trainer.v1.trainer_mode == "sync"
        self._groups = HarnessGroups(self._config, folder)
        self._engine = BorrowedEngine(
            # The plain client's method, also of the client that resumes by itself: it hides which weights sampled what.
            functools.partial(LLMServerClient.generate, llm_client),
            context_length=rollout.max_model_len,
            stop_ids=self._groups.renderer.stop_ids,
            seeded=rollout.name != "sglang",
        )
        self._broken: BaseException | None = None
        self._dropped = 0
        self._legs: Legs | None = None
        seeing = self._groups.renderer.placeholders
        model = str(config.actor_rollout_ref.model.path)
        self._seen = None if seeing is None else SeenImages.of(model, seeing.token_id)
        self._groups.open(self._engine)

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> AgentLoops:
        """How veRL makes one. Teachers and reward workers are not used: verifiers grade."""
        return cls(config, llm_client)

    def generate_sequences(self, prompts: Any) -> None:
        """Begin a group for every prompt and return. `prompts`: a TensorDict with `uid`, `task` and `global_steps`.

        Raises TrainingError when collecting has broken for good; veRL then stops.
        """
        if self._broken is not None:
            raise TrainingError(f"rollouts cannot go on: {self._broken}") from self._broken
        step = int(prompts["global_steps"])
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        trained = step if validate else step - 1  # veRL validates after the step that it trains
        if self._legs is None:
            store = self._groups.rooms.folder.store
            self._legs = self._groups.thread.wait(Legs.resume(store, trained, "verl"))
            self._engine.serves(trained)
        elif self._sync:
            self._engine.serves(trained)
        for uid, name in zip(list(prompts["uid"]), list(prompts["task"]), strict=True):
            self._groups.thread.submit(self._answer(str(uid), str(name), step, validate), self._break)

    def close(self) -> None:
        """Stop what is in flight and close the rooms. Idempotent."""
        self._groups.close()

    def _break(self, error: BaseException) -> None:
        """Collecting is over: the next `generate_sequences` says why."""
        log.error("rollouts stop", exc_info=error)
        self._broken = self._broken or error

    async def _answer(self, uid: str, name: str, step: int, validate: bool) -> None:
        """Run one group and put it, or say that it failed."""
        partition = "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        group: Group | None = None
        try:
            group = await self._collect(name, step, validate)
            if group is not None:
                await self._put(uid, group, step, partition)
        except Exception as error:  # noqa: BLE001 (veRL must hear of the group, whatever happened to it)
            self._break(error)
            group = None
        status = "failure" if group is None else "finished"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _collect(self, name: str, step: int, validate: bool) -> Group | None:
        """A complete group, or None when it was dropped. TrainingError when a step's worth was dropped in a row."""
        task = self._groups.tasks[name]
        source, size = self._source(task, step, validate)
        groups = source.collect([task], group_size=size, weights_version=self._engine.weights_version, step=step)
        found = [group async for group in groups]
        if found:
            self._dropped = 0
            return found[0]
        self._dropped += 1
        log.warning("step %d: the group of task %s was dropped: its refills ran out", step, name)
        if self._dropped >= self._config.train.groups_per_step:
            raise TrainingError(
                f"{self._dropped} groups in a row could not be completed; see the attempts' failures in "
                f"{self._groups.rooms.folder.path}, repair the cause and resume"
            )
        return None

    def _source(self, task: Task, step: int, validate: bool) -> tuple[GroupSource, int]:
        """Where the next group of `task` comes from, and its size."""
        assert self._legs is not None
        own = self._rollout
        kwargs = own.val_kwargs
        if validate:
            purpose, again, size = self._legs.validation(step), 0, int(kwargs.n)
            sampling = Sampling(temperature=kwargs.temperature, top_p=kwargs.top_p, top_k=max(0, kwargs.top_k))
        else:
            (purpose, again), size = self._legs.place(step, task), int(own.n)
            sampling = Sampling(temperature=own.temperature)
        return self._groups.source(sampling, purpose=purpose, again=again), size

    async def _put(self, uid: str, group: Group, step: int, partition: str) -> None:
        """Put the rows of every rollout where veRL looks for them."""
        keys: list[str] = []
        fields: list[dict[str, Any]] = []
        tags: list[dict[str, Any]] = []
        for member in graded(group, self._groups.renderer.placeholders):
            rollout = member.rollout
            images = await self._groups.rooms.folder.calls.images(
                {image.sha256 for row in member.rows for image in row.images}
            )
            for index, row in enumerate(member.rows):
                keys.append(f"{uid}_{rollout.index}_{index}")
                own = {"uid": uid, "session_id": rollout.index, "task": rollout.task}
                more = {} if self._seen is None else _seen(self._seen, row, images)
                fields.append(_fields(row, member.verdict, len(member.rows)) | more | own)
                tags.append(_tag(row, step))
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition
        )


def _fields(row: Row, verdict: Verdict, rows: int) -> dict[str, Any]:
    """A row as veRL's workers read it. Every row of a rollout carries the rollout's reward, as veRL's own loops do."""
    low, high = row.versions
    output = AgentLoopOutput(
        prompt_ids=list(row.prompt_ids),
        response_ids=list(row.response_ids),
        response_mask=list(row.response_mask),
        response_logprobs=list(row.response_logprobs),
        reward_score=verdict.reward,
        num_turns=rows,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "reward_extra_info": {"acc": float(verdict.passed)},
            "global_steps": low,
            "min_global_steps": low,
            "max_global_steps": high,
        },
    )
    fields = output.as_dict()
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(len(fields["input_ids"]))
    fields["multi_modal_inputs"] = {}
    fields["data_source"] = "openforgerl"
    return fields


def _seen(by: SeenImages, row: Row, images: Mapping[str, bytes]) -> dict[str, Any]:
    """What the rows of a model that sees have otherwise, whether they show an image or not."""
    inputs, positions = by.inputs(row, images)
    return {"multi_modal_inputs": inputs, "position_ids": positions}


def _tag(row: Row, step: int) -> dict[str, Any]:
    low, high = row.versions
    prompt, response = len(row.prompt_ids), len(row.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": low,
        "max_global_steps": high,
    }
