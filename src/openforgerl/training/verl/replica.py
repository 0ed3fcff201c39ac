"""The torch engine as an inference server of veRL's: one Ray actor, weights pushed into it after each step.

Contracts: veRL 0.9 `workers/rollout/replica.py` (RolloutReplica, and what `LLMServerClient` calls on a server) and
`workers/rollout/base.py` (BaseRollout). Answers, log-probs and versions are those of `engines/torch_engine`.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.types import Prompt, Sampling


class TorchServer:
    """What the Ray actor holds."""

    def __init__(self, model: str, context_length: int | None) -> None:
        self._engine = TorchEngine(Path(model), options=EngineOptions(context_length=context_length))
        self._step = 0
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._aborts = 0

    async def launch(self) -> str:
        """The address that nobody calls: this server speaks Ray only."""
        return "127.0.0.1:0"

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        """A TokenOutput: one answer, or what of it there is when `abort_all_requests` comes."""
        await self._admitted.wait()
        aborts, step = self._aborts, self._step
        ids: list[int] = []
        logprobs: list[float] = []
        reason = "completed"
        answer: Any = self._engine.generate(
            Prompt(ids=tuple(prompt_ids)), _sampling(sampling_params), affinity=request_id
        )
        async with contextlib.aclosing(answer) as chunks:
            async for chunk in chunks:
                ids += chunk.ids
                logprobs += chunk.logprobs or ()
                if self._aborts != aborts and chunk.finish is None:
                    reason = "aborted"
                    break
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields={"global_steps": step})

    async def update_weights(self, weights: dict[str, torch.Tensor], global_steps: int) -> None:
        """Serve these weights from now on. Raises InputError when they are not this model's."""
        await self._engine.load(weights, global_steps)
        self._step = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Answers under way end with what they have; new ones wait for `resume_generation`."""
        self._admitted.clear()
        self._aborts += 1

    async def resume_generation(self) -> None:
        self._admitted.set()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory was never released."""

    async def sleep(self) -> None:
        """Memory is not released."""

    async def clear_kv_cache(self) -> None:
        """Keys and values are kept by weights version: old ones are never used."""

    async def release_kv_cache(self) -> None:
        """Memory is not released."""

    async def resume_kv_cache(self) -> None:
        """Memory was never released."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing to profile."""

    async def stop_profile(self) -> None:
        """Nothing to profile."""


class TorchReplica(RolloutReplica):
    """Launches the actor."""

    async def launch_servers(self) -> None:
        """One server, found by its name by the worker that pushes weights to it."""
        path = self.model_config.get("local_path", None) or self.model_config.path
        server = (
            ray.remote(TorchServer)
            .options(name=_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(path, self.config.max_model_len)
        )
        self._server_address = await server.launch.remote()
        self._server_handle = server
        self.servers = [server]


class ServerAdapter(BaseRollout):
    """Lives in the training worker of rank r and pushes its weights to replica r."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ.get("RANK", "0"))
        self.is_leader_rank = True
        self.sleep_level = 2

    async def resume(self, tags: list[str]) -> None:
        """Memory was never released."""

    async def release(self) -> None:
        """Memory is not released."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Push whole tensors in fp32. ValueError for a wire format that holds differences."""
        if wire_format != "named_tensors":
            raise ValueError(f"the torch replica takes named tensors; got wire_format {wire_format!r}")
        named = {name: _whole(tensor) for name, tensor in weights}
        await ray.get_actor(_name(self.replica_rank)).update_weights.remote(named, global_steps or 0)


def _whole(tensor: Any) -> torch.Tensor:
    """A tensor of its own: a shard gathered, nothing shared with the trainer, which goes on changing it."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().float().cpu().clone()


def _name(rank: int) -> str:
    return f"openforgerl_torch_{rank}"


def _sampling(params: dict[str, Any]) -> Sampling:
    top_k = params.get("top_k", -1)
    return Sampling(
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=0 if top_k < 0 else top_k,
        presence_penalty=params.get("presence_penalty", 0.0),
        frequency_penalty=params.get("frequency_penalty", 0.0),
        repetition_penalty=params.get("repetition_penalty", 1.0),
        seed=params.get("seed"),
        max_tokens=params["max_tokens"],
    )
