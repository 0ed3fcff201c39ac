"""Init's watchdog, called directly: what it meets must not end init, and with it the sandbox."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from openforgerl.sandboxes.inside import init


def test_the_largest_process_may_be_gone_when_it_is_to_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm's processes are reaped by their own parents while init counts; init once died of it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone: Any = SimpleNamespace(pid=ended.pid, rss=1 << 30)
    monkeypatch.setattr(init, "processes", lambda: {gone.pid: gone})
    job: Any = SimpleNamespace(oom=False)
    loop: Any = SimpleNamespace(settings={"writable": [], "most_inodes": 0, "most_memory": 1 << 20}, jobs={1: job})
    loop.overrun = lambda: init.Init.overrun(loop)
    init.Init.watch(loop)
    assert job.oom
