"""`openforgerl eval` with a model behind somebody else's API: a real harness in a real sandbox, the key outside."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from openforgerl.rendering import load_renderer
from openforgerl.store import Database, RunStore
from openforgerl.testing.fake_upstream import KEY, calls, says, upstream
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Source

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"
SPY = "env; cat /proc/*/environ; cp cook.csv moon.csv && echo copied"


@pytest.mark.sandbox
async def test_a_baseline_is_measured_and_its_rollouts_are_sft_data(tmp_path: Path) -> None:
    tokenizer = write_tiny_model(tmp_path / "tiny")
    run = tmp_path / "run"
    (tmp_path / "config.toml").write_text(
        "tokenizer = " + json.dumps(str(tokenizer)) + "\n"
        '[harness]\nname = "react"\n'
        '[engine.relay]\nmodel = "teacher-1"\nkey_env = "TEACHER_KEY"\nprice_in = 2.0\nprice_out = 10.0\n'
    )
    async with upstream(calls(("bash", json.dumps({"command": SPY}))), says("Done.")) as fake:
        words = ["eval", TASK, "-c", tmp_path / "config.toml", "--engine", f"relay:openai:{fake.url}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from openforgerl.cli.main import main; main()",
            *map(str, [*words, "-s", "attempts=1", "--run", run]),
            env={**os.environ, "TEACHER_KEY": KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out = (await process.communicate())[0].decode()
    assert process.returncode == 0, out
    assert json.loads((run / "eval.json").read_text())["pass_at_1"]["value"] == 1.0
    # 50 + 100 prompt tokens, 60 of them cached at the same price, 20 + 7 of answer.
    assert f"cost {(150 * 2 + 27 * 10) / 1e6:.4f}" in out
    # The agent looked everywhere it can; what it saw came back to the upstream.
    seen = fake.bodies[1]["messages"][-1]
    assert seen["role"] == "tool" and "copied" in seen["content"] and "PATH=" in seen["content"]
    assert KEY not in json.dumps(fake.bodies) + out
    for file in run.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    async with Database.read_only(run / "run.sqlite") as database:
        store = RunStore(database)
        (attempt,) = await store.attempts()
        found = await store.samples([attempt.attempt_id])
    renderer = load_renderer(tokenizer)
    (sample,) = found[attempt.attempt_id].samples
    assert sample.source is Source.TEACHER and sample.logprobs is None
    first, second = (renderer.decode(sample.ids[span.start : span.stop]) for span in sample.spans)
    assert first.startswith('<tool_call>\n{"name": "bash"') and second == "Done.<|im_end|>"
