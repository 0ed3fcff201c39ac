"""When no group can be completed, veRL's run ends and says why; it neither waits for ever nor trains on nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from setting import write_setting
from twice import ALWAYS_FAILS

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1500)]


def test_a_run_that_only_fails_stops(tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    config = write_setting(tmp_path, steps=2, tasks=(ALWAYS_FAILS,))
    log = tmp_path / "log.txt"
    words = ("train", "grpo", "-c", str(config), "--run", str(tmp_path / "run"), "-s", "train.groups_per_step=1")
    assert start(*words, log=log).wait(1200) == 1
    said = log.read_text(errors="replace")
    assert "TrainingError: rollouts cannot go on: 1 groups in a row could not be completed" in said
    assert "killed from outside with signal 9" in said  # each attempt's failure
    assert "The same command resumes" in said
