"""What a contract check is given."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from openforgerl.protocols import AdoptedSandbox, Sandbox, Sandboxes
from openforgerl.types import Exit, SandboxSpec


@dataclass(frozen=True, slots=True)
class Case:
    """One backend under test."""

    open: Callable[[], Sandboxes]
    """A fresh instance over the same state, as a restarted orchestrator would make it."""
    spec: SandboxSpec
    """A spec that this backend can carry out; checks change single fields of it."""
    folder: Path
    """An empty folder of the host for the check's own use."""
    leftovers: Callable[[], Awaitable[list[str]]]
    """Every process, mount, group, container or object that the backend's sandboxes have, in words."""
    murder: Callable[[Sandbox], Awaitable[None]] | None = None
    """End a sandbox from outside, as a crash would."""
    adopt: Callable[[Sandboxes, Sandbox], Awaitable[AdoptedSandbox]] | None = None
    """For a backend whose sandboxes outlive the orchestrator: take `sandbox`, made by another instance, over."""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Words of this backend's report that checks compare: `backend`."""


def shell(script: str) -> list[str]:
    """A script's argv."""
    return ["sh", "-c", script]


async def told(sandbox: Sandbox, script: str, *, timeout: float = 30.0) -> str:
    """What a script that must end well prints."""
    end: Exit = await sandbox.exec(shell(script), env={}, timeout=timeout)
    assert end.code == 0, end
    return end.stdout.decode()


@contextlib.contextmanager
def refused(kind: type[BaseException], words: str = "") -> Generator[list[BaseException]]:
    """The block must raise `kind`, with `words` in its message; the list then holds the error."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        assert words.lower() in str(error).lower(), f"{error} does not say {words!r}"
        caught.append(error)
        return
    raise AssertionError(f"nothing was refused; expected {kind.__name__} {words!r}")
