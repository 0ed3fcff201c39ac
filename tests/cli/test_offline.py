"""A run in a network namespace in which not even the loopback is up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openforgerl.demo.bundle import bundled_tasks
from openforgerl.testing.tiny_model import write_tiny_model

OWN_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-current-user", "--net"]


@pytest.mark.sandbox
def test_a_run_needs_no_network(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "tiny")
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"text": "Done."}]}))
    openforgerl = [sys.executable, "-c", "from openforgerl.cli.main import main; main()"]
    words = ["run", str(bundled_tasks() / "rl-copy-00"), "--engine", f"scripted:{script}", "--tokenizer", str(tiny)]
    words += ["--harness", "react", "--run", str(tmp_path / "run")]
    ended = subprocess.run([*OWN_NETWORK, *openforgerl, *words], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "reward 0" in ended.stdout
