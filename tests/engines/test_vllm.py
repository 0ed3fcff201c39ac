"""A real vLLM server (its CPU build) with SmolLM2, and pi: ids and log-probs are the server's, weights are reloaded.

Needs `scripts/vllm_env.sh` and `scripts/make_smollm2.py`; see docs/engines.md. Run by hand with `-m slow`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.server_engine import ServerEngine
from openforgerl.rendering import load_renderer
from openforgerl.store import CallStore, Database, RunStore
from openforgerl.types import CallStatus, ModelCall, Prompt, Sampling

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"
PYTHON, MODEL = os.environ.get("OPENFORGERL_VLLM_PYTHON", ""), os.environ.get("OPENFORGERL_SMOLLM2", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (PYTHON and MODEL),
        reason="OPENFORGERL_VLLM_PYTHON and OPENFORGERL_SMOLLM2 name no vLLM and no model (docs/engines.md)",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    words = (PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", "smol")
    words += ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192", "--dtype", "float32")
    words += ("--enforce-eager", "--max-num-seqs", "4", "--logprobs-mode", "processed_logprobs")
    extra = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    extra |= {"HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "2"}
    with log.open("wb") as out:
        process = subprocess.Popen(words, env={**os.environ, **extra}, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(url + "/health", timeout=1)
                break
            except OSError:
                subprocess.run(["sleep", "1"], check=True)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def scored(url: str, call: ModelCall) -> list[float]:
    """The server's own log-probs of the sampled ids, as part of a prompt."""
    ids = [*call.prompt.ids, *call.sampled_ids]
    body = {"model": "smol", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    rows = post(url, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [rows[at][str(ids[at])]["logprob"] for at in range(len(call.prompt.ids), len(ids))]


@pytest.mark.node
@pytest.mark.sandbox
async def test_pi_runs_on_it_and_what_is_recorded_is_the_servers_own(server: str, tmp_path: Path) -> None:
    words = ["run", TASK, "--engine", f"vllm:{server}", "--tokenizer", MODEL, "--harness", "pi"]
    words += ["--run", tmp_path / "run", "-s", "rollout.calls=3", "-s", "rollout.max_output_tokens=64"]
    words += ["-s", "rollout.agent_timeout=900"]
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("openforgerl"), *map(str, words), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-2000:]
    async with Database.read_only(tmp_path / "run" / "run.sqlite") as database:
        (attempt,) = await RunStore(database).attempts()
        calls = await CallStore(database).calls(attempt.attempt_id)
    answered = [call for call in calls if call.status is CallStatus.COMPLETE]
    (agent,) = attempt.harness["user_agents"]
    assert answered and agent.startswith("pi/1.6.0")
    for call in answered:
        assert call.logprobs is not None and len(call.logprobs) == len(call.sampled_ids) > 0
        expected = await asyncio.to_thread(scored, server, call)
        worst = max(abs(a - b) for a, b in zip(call.logprobs, expected, strict=True))
        print(f"{call.call_id}: {len(call.prompt.ids)} + {len(call.sampled_ids)} ids, log-probs differ by {worst:.1e}")
        assert worst < 1e-3


async def test_weights_are_reloaded_and_tokens_say_which(server: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  not needed to collect this file

    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    weights = load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**weights, name: weights[name] * 1.5}, other / "model.safetensors", metadata={"format": "pt"})
    engine = await asyncio.to_thread(
        open_engine, f"vllm:{server}", load_renderer(Path(MODEL)), EngineOptions(context_length=8192)
    )
    assert isinstance(engine, ServerEngine)

    async def sample() -> tuple[list[int], list[float], set[int]]:
        prompt = Prompt(ids=tuple(range(100, 140)))
        chunks = [c async for c in engine.generate(prompt, Sampling(max_tokens=4, seed=1), affinity="s")]
        ids = [id for chunk in chunks for id in chunk.ids]
        return ids, [v for c in chunks for v in c.logprobs or ()], {c.weights_version for c in chunks}

    try:
        before = await sample()
        assert before[2] == {0} and await sample() == before  # seeded
        for weights_of, version in ((other, 1), (Path(MODEL), 2)):
            await engine.pause()
            await engine.load(weights_of, version)
            await engine.resume()
            ids, logprobs, versions = await sample()
            assert versions == {version} == {engine.weights_version}
            same = ids == before[0] and max(abs(a - b) for a, b in zip(logprobs, before[1], strict=True)) < 1e-4
            assert same == (version == 2)
    finally:
        await engine.close()
