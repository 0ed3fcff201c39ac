"""A process backend with its state in a fresh folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions
from openforgerl.types import SandboxSpec


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
def backend(state: Path) -> ProcessSandboxes:
    return ProcessSandboxes(SandboxOptions(), state)


@pytest.fixture
def spec() -> SandboxSpec:
    return SandboxSpec(run_id="run")
