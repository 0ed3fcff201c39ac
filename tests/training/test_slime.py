"""slime's extension points, held to the contract read from its source, and run with a real harness and engine."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from openforgerl.demo.pipeline import base_model
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import ConfigError, ExactnessError
from openforgerl.testing.served_engine import as_sglang

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"
CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "contracts/slime.json").read_text())


def slime_sample() -> type:
    """A stand-in for slime's `Sample`: its fields, its statuses and its strictness, from the contract."""
    status = enum.Enum("Status", CONTRACT["statuses"])
    made = dataclasses.make_dataclass(
        "Sample", [(name, Any, dataclasses.field(default=None)) for name in CONTRACT["sample_fields"]]
    )

    def from_dict(form: dict[str, Any]) -> Any:
        assert form.keys() <= set(CONTRACT["sample_fields"]), "slime would set an attribute that nothing reads"
        return made(**{**form, "status": status(form["status"])})

    made.Status, made.from_dict = status, staticmethod(from_dict)  # type: ignore[attr-defined]
    return made


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    types = ModuleType("slime.utils.types")
    types.Sample = slime_sample()  # type: ignore[attr-defined]
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.utils.types", types)
    monkeypatch.delitem(sys.modules, "openforgerl.training.slime", raising=False)
    return importlib.import_module("openforgerl.training.slime")


@pytest.fixture
def router() -> Iterator[str]:
    """The demo's base model as slime's router would serve it, on a loop of its own: slime's calls block."""
    ready, done = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        engine = TorchEngine(base_model(), model_name="policy", options=EngineOptions(context_length=2048))
        async with as_sglang(engine) as url:
            found.append(url)
            ready.set()
            await asyncio.to_thread(done.wait)
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    done.set()
    thread.join()


def arguments(tmp_path: Path, url: str) -> SimpleNamespace:
    config = tmp_path / "grpo.toml"
    config.write_text(
        f"tokenizer = {json.dumps(str(base_model()))}\n"
        f"[tasks]\npath = {json.dumps(str(TASK))}\n"
        '[harness]\nname = "react"\n[rollout]\nmax_output_tokens = 24\ncalls = 3\n'
    )
    where = urlsplit(url)
    return SimpleNamespace(
        openforgerl_config=str(config),
        openforgerl_run=str(tmp_path / "run"),
        sglang_router_ip=where.hostname,
        sglang_router_port=where.port,
        hf_checkpoint="",
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        n_samples_per_eval_prompt=1,
        rollout_temperature=1.0,
        grpo_std_normalization=True,
    )


def test_slime_can_call_us(slime: ModuleType) -> None:
    call = CONTRACT["rollout_call"]
    # `call_rollout_fn(fn, *args, evaluation=...)`: all but the function itself are passed on
    inspect.signature(slime.generate_rollout).bind(*call["positional"][1:], **dict.fromkeys(call["keywords"]))
    inspect.signature(slime.post_process_rewards).bind(*CONTRACT["reward_call"]["positional"])
    for name, parameters in CONTRACT["data_source"].items():
        method = inspect.signature(getattr(slime.TaskSource, name))
        assert list(method.parameters)[1:] == parameters, name


@pytest.mark.sandbox
def test_a_group_is_rolled_out_in_the_harness_and_resumes(slime: ModuleType, router: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, router)
    source = slime.TaskSource(args)
    assert len(source) == 1
    try:
        (group,) = slime.generate_rollout(args, 0, source, evaluation=False)
        assert {sample.rollout_id for sample in group} == {0, 1} and {sample.group_index for sample in group} == {0}
        for sample in group:
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            start = len(sample.tokens) - sample.response_length
            assert sum(sample.loss_mask) > 0 and source.groups.renderer.decode(sample.tokens[start:]) == sample.response
            trained = [value for value, on in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if on]
            assert max(trained) <= 0 > min(trained) and sample.reward in (0.0, 1.0)
            assert sample.weight_versions == ["0"] * len(sample.weight_versions)
        # the same step again, as after a restart: the very same rows, nothing is run
        again = slime.generate_rollout(args, 0, source)
        assert [sample.tokens for sample in again[0]] == [sample.tokens for sample in group]
        table = slime.generate_rollout(args, 3, source, evaluation=True)["openforgerl"]
        assert len(table["rewards"]) == len(table["truncated"]) == len(table["samples"]) >= 1
        assert {version for sample in table["samples"] for version in sample.weight_versions} == {"3"}
    finally:
        source.groups.close()  # what slime's process does at its end


def row(slime: ModuleType, group: int, rollout: int, reward: float) -> Any:
    form = {"group_index": group, "rollout_id": rollout, "reward": reward, "status": "completed"}
    return sys.modules["slime.utils.types"].Sample.from_dict(form)  # type: ignore[attr-defined]


def test_a_rollout_with_many_rows_counts_once(slime: ModuleType) -> None:
    # Group 0: rewards 1, 0, 0 of three rollouts, the first with three rows. Group 1: 0 and 2.
    rows = [row(slime, 0, 0, 1.0)] * 3 + [row(slime, 0, 1, 0.0), row(slime, 0, 2, 0.0)]
    rows += [row(slime, 1, 3, 0.0), row(slime, 1, 4, 2.0)]
    raw, advantages = slime.post_process_rewards(SimpleNamespace(grpo_std_normalization=False), rows)
    assert raw == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0]
    assert advantages == pytest.approx([2 / 3, 2 / 3, 2 / 3, -1 / 3, -1 / 3, -1.0, 1.0])
    _, normalised = slime.post_process_rewards(SimpleNamespace(), rows)
    # sample deviations: of 1, 0, 0 it is sqrt(1/3); of 0, 2 it is sqrt(2)
    assert normalised[0] == pytest.approx((2 / 3) / (1 / 3) ** 0.5, abs=1e-5)
    assert normalised[-1] == pytest.approx(1 / 2**0.5, abs=1e-5)
    with pytest.raises(ExactnessError, match="differ in reward"):
        slime.post_process_rewards(SimpleNamespace(), [row(slime, 0, 0, 1.0), row(slime, 0, 0, 0.5)])


def test_what_is_missing_is_named(slime: ModuleType, tmp_path: Path) -> None:
    args = arguments(tmp_path, "http://127.0.0.1:9")
    args.openforgerl_run = ""
    with pytest.raises(ConfigError, match=r"openforgerl_run .*--custom-config-path"):
        slime.TaskSource(args)
    args.openforgerl_run = str(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be reached"):
        slime.generate_rollout(args, 0, slime.TaskSource(args))
