"""veRL's tests run in veRL's environment; everywhere else they are not collected (`make test-verl`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the planted harness has one name, in veRL's processes and here
collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]

ENVIRONMENT = {
    "PYTHONPATH": str(HERE),  # the planted harness, in every process
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_worker_niceness": "0",  # Ray starts workers at 15, where a busy machine starves them
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
}


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """Start `openforgerl ARGUMENTS`; its output goes to `log`."""

    def started(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", "from openforgerl.cli.main import main; main()", *arguments],
                env=os.environ | ENVIRONMENT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return started


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever of the process's session is left is killed; used when a test fails."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
