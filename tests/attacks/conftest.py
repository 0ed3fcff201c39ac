"""How an attack is run: a real program of `programs/`, in a sandbox whose guards are on, or one of them off."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from openforgerl.sandboxes import LiveSandbox, ProcessSandboxes, SandboxOptions
from openforgerl.sandboxes.container import ContainerSandboxes
from openforgerl.sandboxes.guards import Guards
from openforgerl.types import Exit, SandboxLimits, SandboxSpec

PROGRAMS = Path(__file__).parent / "programs"


class Cell:
    """One sandbox with the attack programs in /tmp/programs."""

    def __init__(self, sandbox: LiveSandbox) -> None:
        self.sandbox = sandbox

    async def attack(self, program: str, *words: object, timeout: float = 20.0) -> Exit:
        interpreter = "python3" if program.endswith(".py") else "sh"
        argv = [interpreter, f"/tmp/programs/{program}", *(str(word) for word in words)]
        return await self.sandbox.exec(argv, env={}, timeout=timeout)

    async def words(self, program: str, *words: object) -> list[str]:
        """What the program printed; it must end well."""
        end = await self.attack(program, *words)
        assert end.code == 0, end
        return end.stdout.decode().split()


Open = Callable[..., AbstractAsyncContextManager[Cell]]


BACKENDS = ("process", pytest.param("container", marks=pytest.mark.container))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Which kind of sandbox the attack meets."""
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An engine bounds memory by a cgroup or not at all: "without cgroups" is about processes only.

    A test marked `process_only` says why in its docstring.
    """
    meant: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        contained = values.get("backend") == "container"
        alone = values.get("cgroups") == "off" or item.get_closest_marker("process_only") is not None
        (left if contained and alone else meant).append(item)
    items[:] = meant
    config.hook.pytest_deselected(items=left)


@pytest.fixture
def cell(tmp_path: Path, backend: str) -> Open:
    """`cell(guards, cgroups=..., limits..., spec fields...)`: an async context manager."""

    @asynccontextmanager
    async def enter(
        guards: Guards | None = None, *, limits: SandboxLimits | None = None, cgroups: str = "auto", **spec: Any
    ) -> AsyncIterator[Cell]:
        options = SandboxOptions(cgroups=cgroups)  # type: ignore[arg-type]
        kind = ContainerSandboxes if backend == "container" else ProcessSandboxes
        sandboxes = kind(options, tmp_path / "sandboxes", guards=guards)
        spec.setdefault("endpoint_port", free_port())
        asked = SandboxSpec(
            run_id="attacks", limits=limits or SandboxLimits(), files={"/tmp/programs": str(PROGRAMS)}, **spec
        )
        async with sandboxes.create(asked, "attempt") as sandbox:
            yield Cell(sandbox)
        token = sandbox.ref.detail["token"]
        assert not [path for path in (tmp_path / "sandboxes").rglob("*") if token in path.name]

    return enter


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A host directory that every user may read (pytest's own may be entered by nobody else)."""
    folder = Path(tempfile.mkdtemp(prefix="openforgerl-attack-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def free_port() -> int:
    """A port that is free on the host, which only matters with the network guard off."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
