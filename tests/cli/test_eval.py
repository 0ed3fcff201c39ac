"""`openforgerl eval` over several harnesses: each on every task, compared task by task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openforgerl.cli.main import main
from openforgerl.testing.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"


@pytest.mark.sandbox
def test_harnesses_are_measured_on_the_same_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"text": "I did nothing."}]}))
    config = tmp_path / "config.toml"
    config.write_text('[harness.command]\nargv = ["cp", "cook.csv", "moon.csv"]\n')
    words = ["eval", TASK, "-c", config, "--engine", f"scripted:{script}", "--run", tmp_path / "run"]
    words += ["--tokenizer", write_tiny_model(tmp_path / "tiny"), "-s", "attempts=2"]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in [*words, "--harness", "react", "--harness", "command"]])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    # react stopped at once, the command solved the task: twice each
    assert {name: (one["passed"], one["attempts"]) for name, one in found["harnesses"].items()} == {
        "react": (0, 2),
        "command": (2, 2),
    }
    assert found["compared"]["command"]["pass_at_1"]["value"] == 1.0
    assert "command over react, pass@1: +1.000" in out and "1 tasks, 2 attempts each, 0 without" in out
