"""The contract of sandboxes, held against every backend of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from openforgerl.protocols import Sandbox
from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions
from openforgerl.sandboxes.container import ContainerSandboxes
from openforgerl.sandboxes.container_engine import find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.testing.contracts.case import Case
from openforgerl.testing.contracts.sandboxes import CHECKS, WITHOUT_PROGRAMS
from openforgerl.testing.fake_sandbox import FakeSandboxes
from openforgerl.types import SandboxLimits, SandboxSpec

RUN = f"contract-{os.getpid()}"
SPEC = SandboxSpec(run_id=RUN, limits=SandboxLimits(memory_mb=512, processes=100, disk_mb=64))


async def murder(sandbox: Sandbox) -> None:
    """SIGKILL to init, from the host."""
    detail = sandbox.ref.detail
    init = detail["init_pid"] if sandbox.ref.backend == "container" else int(list(detail["processes"])[1])
    os.kill(init, signal.SIGKILL)


@pytest.fixture
def process_case(tmp_path: Path) -> Case:
    state = tmp_path / "state"

    async def leftovers() -> list[str]:
        return [str(path) for path in state.glob("*.json")]

    (tmp_path / "own").mkdir()
    return Case(
        open=lambda: ProcessSandboxes(SandboxOptions(), state),
        spec=SPEC,
        folder=tmp_path / "own",
        leftovers=leftovers,
        murder=murder,
        names={"backend": "process"},
    )


@pytest.fixture
def container_case(tmp_path: Path) -> Case:
    state = tmp_path / "state"

    async def leftovers() -> list[str]:
        engine = find_engine(ContainerOptions())
        names = (await engine.call("ps", "--all", "--filter", "label=openforgerl.run", "--format", "{{.Labels}}"))[1]
        found = [line for line in names.splitlines() if RUN in line]
        return found + [str(path) for path in state.glob("containers/*")]

    (tmp_path / "own").mkdir()
    return Case(
        open=lambda: ContainerSandboxes(SandboxOptions(), state),
        spec=SPEC,
        folder=tmp_path / "own",
        leftovers=leftovers,
        murder=murder,
        names={"backend": "container"},
    )


@pytest.fixture
def fake_case(tmp_path: Path) -> Case:
    backend = FakeSandboxes()

    async def leftovers() -> list[str]:
        return list(backend.live)

    return Case(open=lambda: backend, spec=SPEC, folder=tmp_path, leftovers=leftovers, names={"backend": "fake"})


@pytest.mark.parametrize("name", CHECKS)
async def test_process(name: str, process_case: Case) -> None:
    await CHECKS[name](process_case)


@pytest.mark.container
@pytest.mark.parametrize("name", CHECKS)
async def test_container(name: str, container_case: Case) -> None:
    await CHECKS[name](container_case)


@pytest.mark.parametrize("name", WITHOUT_PROGRAMS)
async def test_fake(name: str, fake_case: Case) -> None:
    await WITHOUT_PROGRAMS[name](fake_case)
