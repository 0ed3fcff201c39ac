"""The demo never falls back: without the real harness it says how to get it, and starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPENFORGERL_CACHE": str(tmp_path / "empty")}
    command = [Path(sys.executable).with_name("openforgerl"), "demo", "--run", tmp_path / "run", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_without_pi_the_demo_fails_and_names_the_command(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 2
    assert "openforgerl harness install pi" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_changed_pi_is_refused(tmp_path: Path) -> None:
    """A package that is not the published one, byte for byte, is no real harness."""
    directory = tmp_path / "empty" / "harnesses"
    directory.mkdir(parents=True)
    (directory / "pi-1.6.0").mkdir()
    assert demo(tmp_path).returncode == 2


def test_the_run_folder_of_another_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    done = demo(tmp_path, "--harness", "react")
    assert done.returncode == 2 and "another config" in done.stderr
