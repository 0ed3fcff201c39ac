"""OpenRLHF's agent executor, held to the contract read from its wheel, and run with a real harness and engine.

With `OPENFORGERL_OPENRLHF=DIR` (an unpacked wheel's folder that holds `openrlhf/`) the contract is compared with the
source, our class is made from OpenRLHF's own base class, and its own code takes our episodes; nothing needs a GPU.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import ConfigError, InputError, TrainingError
from openforgerl.rendering import load_renderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Prompt, Sampling

HERE = Path(__file__).parent
CONTRACT: dict[str, Any] = json.loads((HERE / "contracts/openrlhf.json").read_text())
SOURCE = os.environ.get("OPENFORGERL_OPENRLHF", "")
TASKS = ("rlhf/task-0", "rlhf/task-1", "trl/task-broken")
CONFIG = """
seed = 5
tokenizer = "{model}"
[tasks]
path = "{tasks}"
[harness]
name = "says:SayingReact"
[rollout]
max_output_tokens = 12
calls = 3
[run]
concurrency = 2
refill_limit = 1
"""
needs_source = pytest.mark.skipif(not SOURCE, reason="OPENFORGERL_OPENRLHF names no unpacked wheel")


@dataclass(kw_only=True)
class SamplingParams:
    """vLLM's, as far as OpenRLHF and we fill it; strict about names, as vLLM's is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list[int])
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None


@dataclass
class Actor:
    """`RolloutRayActor` as an executor sees it, over our engine. It belongs to the event loop that made it."""

    engine: TorchEngine
    loop: asyncio.AbstractEventLoop
    asked: list[SamplingParams] = field(default_factory=list[SamplingParams])

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        assert asyncio.get_running_loop() is self.loop and multi_modal_data is None
        self.asked.append(sampling_params)
        sampling = Sampling(
            temperature=sampling_params.temperature, max_tokens=sampling_params.max_tokens, seed=sampling_params.seed
        )
        ids: list[int] = []
        logprobs: list[dict[int, Any]] = []
        finish = None
        async for chunk in self.engine.generate(Prompt(ids=tuple(prompt_token_ids)), sampling, affinity="actor"):
            ids += chunk.ids
            pairs = zip(chunk.ids, chunk.logprobs or (), strict=True)
            logprobs += [{id: SimpleNamespace(logprob=value)} for id, value in pairs]
            finish = chunk.finish.value if chunk.finish else None
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs, finish_reason=finish, text="")]
        )


def base_class() -> ModuleType:
    """A stand-in for `openrlhf.utils.agent`: the one method, with its parameters from the contract."""

    class AgentExecutorBase(ABC):
        @abstractmethod
        async def execute(self, *arguments: Any) -> Any:
            raise AssertionError("abstract")

    module = ModuleType("openrlhf.utils.agent")
    module.AgentExecutorBase = AgentExecutorBase  # type: ignore[attr-defined]
    return module


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our module, with OpenRLHF's own base class where its source is."""
    for name in ("openrlhf", "openrlhf.utils"):
        package = ModuleType(name)
        # Its packages import deepspeed and vllm in their `__init__`; the module that we need does not.
        package.__path__ = [str(Path(SOURCE, *name.split(".")))] if SOURCE else []
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("openrlhf.utils.agent", "openforgerl.training.openrlhf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if not SOURCE:
        monkeypatch.setitem(sys.modules, "openrlhf.utils.agent", base_class())
    return importlib.import_module("openforgerl.training.openrlhf")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / "verl"))
    tasks = importlib.import_module("setting").write_tasks(tmp_path / "tasks", TASKS)
    model = write_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "grpo.toml").write_text(CONFIG.format(tasks=tasks, model=model))
    return tmp_path


@pytest.fixture
async def actor(files: Path) -> AsyncIterator[Actor]:
    stop_ids = load_renderer(files / "model").stop_ids
    engine = TorchEngine(files / "model", options=EngineOptions(context_length=2048), stop_ids=stop_ids)
    yield Actor(engine, asyncio.get_running_loop())
    await engine.close()


async def responses(executor: Any, actor: Actor, label: str, params: Any, size: int) -> list[dict[str, Any]]:
    """As `RolloutRayActor.generate_responses` asks for them."""
    named = {"prompt": f"Do {label}.", "label": label, "sampling_params": params, "max_length": 2048}
    named |= {"hf_tokenizer": None, "llm_engine": actor, "images": None}
    assert list(named) == CONTRACT["execute_call"]
    return await asyncio.gather(*(executor.execute(**named) for _ in range(size)))


def test_openrlhf_can_make_and_call_it(openrlhf: ModuleType, files: Path) -> None:
    made = openrlhf.agent_executor(files / "grpo.toml", files / "run")
    assert made.__name__ == "AgentExecutor" and issubclass(made, openrlhf.AgentExecutorBase)
    assert list(inspect.signature(made.execute).parameters)[1:] == CONTRACT["execute"]
    made()  # without arguments
    assert list(inspect.signature(Actor.generate).parameters)[1:] == CONTRACT["generate"]


@pytest.mark.sandbox
async def test_a_prompts_samples_are_one_group_in_the_harness(openrlhf: ModuleType, files: Path, actor: Actor) -> None:
    executor = openrlhf.agent_executor(files / "grpo.toml", files / "run")()
    params = SamplingParams(logprobs=1, min_tokens=1, skip_special_tokens=False)
    try:
        found = await responses(executor, actor, TASKS[0], params, 3)
        for one in found:
            assert one.keys() == set(CONTRACT["read"])
            length = len(one["observation_tokens"])
            assert len(one["rollout_log_probs"]) == length and one["prompt"] == "Do rlhf/task-0."
            assert 0 <= one["reward"] <= 1 and one["extra_logs"] == {openrlhf.LEFT_OUT: 0.0}
            trained = [place for start, stop in one["action_ranges"] for place in range(start, stop)]
            assert trained and max(one["rollout_log_probs"][place] for place in trained) < 0
            assert all(value == 0 for place, value in enumerate(one["rollout_log_probs"]) if place not in trained)
        groups = {call.seed for call in actor.asked}
        assert len(groups) == len(actor.asked), "every call of every member draws its own numbers"
        for call in actor.asked:
            assert (call.logprobs, call.ignore_eos, call.skip_special_tokens, call.min_tokens) == (0, True, False, 0)
        # The next time it is another group of the same task; without correction no log-probs are handed over.
        again = await responses(executor, actor, TASKS[0], SamplingParams(), 2)
        assert [one["rollout_log_probs"] for one in again] == [None, None]
        assert all(one["observation_tokens"] not in [other["observation_tokens"] for other in found] for one in again)
        rooms = executor.episodes.groups.rooms
        rollouts = await asyncio.wrap_future(executor.episodes.groups.thread.begin(rooms.folder.store.rollouts()))
        assert sorted((rollout.step, rollout.index) for rollout in rollouts) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    finally:
        await asyncio.to_thread(executor.episodes.groups.close)


@pytest.mark.sandbox
async def test_what_openrlhf_has_no_word_for_stops_it(openrlhf: ModuleType, files: Path, actor: Actor) -> None:
    executor = openrlhf.agent_executor(files / "grpo.toml", files / "run")()
    try:
        for params, said in (
            (SamplingParams(top_p=0.9), "top_p is 0.9"),
            (SamplingParams(top_k=20), "top_k 20"),
            (SamplingParams(temperature=0.7), "is_correction_level"),
        ):
            with pytest.raises(ConfigError, match=said):
                await responses(executor, actor, TASKS[0], params, 2)
        with pytest.raises(InputError, match="names no task"):
            await responses(executor, actor, "unknown", SamplingParams(), 1)
        with pytest.raises(TrainingError, match=r"could not be completed.* --failed"):
            await responses(executor, actor, TASKS[2], SamplingParams(), 2)
    finally:
        await asyncio.to_thread(executor.episodes.groups.close)


def function(path: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    tree = ast.parse(Path(SOURCE, "openrlhf", path).read_text())
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )


@needs_source
def test_the_contract_is_that_of_the_source() -> None:
    script = HERE.parents[1] / "scripts/read_contracts.py"
    assert json.loads(subprocess.check_output([sys.executable, script, "openrlhf", SOURCE])) == CONTRACT


@needs_source
@pytest.mark.sandbox
async def test_openrlhfs_own_code_takes_our_episodes(openrlhf: ModuleType, files: Path, actor: Actor) -> None:
    wanted = function("trainer/ppo_utils/samples_generator.py", "_process_response_into_experience")
    wanted.returns = None
    scope: dict[str, Any] = {"torch": torch, "Experience": SimpleNamespace}
    exec(compile(ast.Module([wanted], []), "samples_generator.py", "exec"), scope)
    executor = openrlhf.agent_executor(files / "grpo.toml", files / "run")()
    try:
        found = await responses(executor, actor, TASKS[1], SamplingParams(logprobs=1), 2)
    finally:
        await asyncio.to_thread(executor.episodes.groups.close)
    for one in found:
        made = scope["_process_response_into_experience"](None, one, max_len=2048)
        assert made.sequences[0].tolist() == one["observation_tokens"]
        # OpenRLHF's masks and log-probs are about the next id: place p of them is id p + 1.
        trained = [place for start, stop in one["action_ranges"] for place in range(start, stop)]
        assert (torch.where(made.action_mask[0])[0] + 1).tolist() == trained
        assert made.rollout_log_probs[0].tolist() == pytest.approx(one["rollout_log_probs"][1:])
        assert made.rewards.tolist() == pytest.approx([one["reward"]]) and made.labels == [TASKS[1]]
