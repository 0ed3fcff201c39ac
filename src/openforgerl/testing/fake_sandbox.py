"""A sandbox backend in memory: files in a dictionary, programs as Python functions, failures on order.

It implements `protocols.Sandboxes`, so whatever runs attempts can be tested without starting a process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from openforgerl.errors import InputError, StageError
from openforgerl.types import Exit, JsonValue, Origin, SandboxRef, SandboxSpec, Stage

Verb = Literal["create", "exec", "read", "write", "kill_agent", "export", "write_tree", "close", "adopt", "claim"]


@dataclass(frozen=True, slots=True)
class Program:
    """What a sandbox was asked to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes
    timeout: float


Behaviour = Callable[["FakeSandbox", Program], Awaitable[Exit]]
"""Plays every program. May read and write `sandbox.files`, call a model, sleep, or raise."""


async def nothing_happens(sandbox: FakeSandbox, program: Program) -> Exit:
    """The default behaviour: every program exits 0 and says nothing."""
    del sandbox, program
    return Exit(code=0)


@dataclass(slots=True)
class Event:
    """One verb that was called, in order over the whole backend."""

    verb: Verb
    attempt_id: str
    detail: str = ""


@dataclass(slots=True)
class _Fault:
    verb: Verb
    error: BaseException
    attempt: str | None
    times: int


@dataclass(slots=True)
class FakeSandbox:
    """One sandbox. `files` maps absolute paths to bytes and may be looked at and changed by tests."""

    backend: FakeSandboxes
    spec: SandboxSpec
    attempt_id: str
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    modes: dict[str, int] = field(default_factory=dict[str, int])
    programs: list[Program] = field(default_factory=list[Program])
    agent_alive: bool = False
    closed: bool = False

    @property
    def ref(self) -> SandboxRef:
        return SandboxRef(backend="fake", run_id=self.spec.run_id, attempt_id=self.attempt_id)

    @property
    def report(self) -> Mapping[str, JsonValue]:
        return {"backend": "fake", "limits": {}, "namespaces": {}}

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: bytes = b"",
        timeout: float,
        output_limit: int = 65536,
        key: str = "",
    ) -> Exit:
        """Play the behaviour; longer than `timeout` seconds gives `timed_out` as a real sandbox would."""
        del key
        self.backend.happened("exec", self.attempt_id, " ".join(argv))
        program = Program(tuple(argv), {**self.spec.env, **env}, stdin, timeout)
        self.programs.append(program)
        self.agent_alive = True
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                exit = await self.backend.behaviour(self, program)
        except TimeoutError:
            return Exit(code=None, signal=9, timed_out=True, seconds=time.monotonic() - started)
        return Exit(
            code=exit.code,
            signal=exit.signal,
            stdout=exit.stdout[-output_limit:],
            stderr=exit.stderr[-output_limit:],
            timed_out=exit.timed_out,
            oom=exit.oom,
            seconds=time.monotonic() - started,
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """Raises `FileNotFoundError` when absent, `InputError` when larger than `limit` bytes."""
        self.backend.happened("read", self.attempt_id, path)
        if path not in self.files:
            raise FileNotFoundError(path)
        data = self.files[path]
        if len(data) > limit:
            raise InputError(f"{path} has {len(data)} bytes; at most {limit} may be read")
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.backend.happened("write", self.attempt_id, path)
        self.files[path] = data
        self.modes[path] = mode

    async def kill_agent(self) -> None:
        self.backend.happened("kill_agent", self.attempt_id)
        self.agent_alive = False

    async def export(self, paths: Sequence[str], destination: Path, *, limit: int) -> None:
        """Write every file at or below `paths` to `destination` under its absolute path, slash left out."""
        self.backend.happened("export", self.attempt_id, " ".join(paths))
        chosen = {
            path: data
            for path, data in self.files.items()
            if any(path == root or path.startswith(root.rstrip("/") + "/") for root in paths)
        }
        if sum(map(len, chosen.values())) > limit:
            text = f"export of {' '.join(paths)} is larger than {limit} bytes"
            raise StageError(Stage.VERIFY, "too_large", text, origin=Origin.POLICY, retryable=False)
        for path, data in chosen.items():
            target = destination / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    async def write_tree(self, source: Path, target: str) -> None:
        """Copy a host file or directory in: the counterpart of `export`."""
        self.backend.happened("write_tree", self.attempt_id, target)
        self.files.update(_host_files(source, target))

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.backend.happened("close", self.attempt_id)


class FakeSandboxes:
    """The backend. `events` is everything that happened; `live` what is not closed."""

    def __init__(self, behaviour: Behaviour = nothing_happens) -> None:
        self.behaviour = behaviour
        self.events: list[Event] = []
        self.live: dict[str, FakeSandbox] = {}
        self._faults: list[_Fault] = []

    def plant(self, verb: Verb, error: BaseException, *, attempt: str | None = None, times: int = 1) -> None:
        """The next `times` calls of `verb` (of one attempt, if named) raise `error`."""
        self._faults.append(_Fault(verb, error, attempt, times))

    def counts(self) -> Counter[str]:
        """How often each verb was called."""
        return Counter(event.verb for event in self.events)

    def create(self, spec: SandboxSpec, attempt_id: str) -> AbstractAsyncContextManager[FakeSandbox]:
        """A sandbox that holds `spec.files`; closed on leaving."""
        return self._created(spec, attempt_id)

    @asynccontextmanager
    async def _created(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[FakeSandbox]:
        self.happened("create", attempt_id)
        sandbox = FakeSandbox(self, spec, attempt_id)
        for inside, host in spec.files.items():
            sandbox.files.update(_host_files(Path(host), inside))
        self.live[attempt_id] = sandbox
        try:
            yield sandbox
        finally:
            self.live.pop(attempt_id, None)
            await sandbox.close()

    async def list(self, run_id: str) -> Sequence[SandboxRef]:
        return [sandbox.ref for sandbox in self.live.values() if sandbox.spec.run_id == run_id]

    async def reap(self, run_id: str) -> int:
        doomed = [sandbox for sandbox in self.live.values() if sandbox.spec.run_id == run_id]
        for sandbox in doomed:
            del self.live[sandbox.attempt_id]
            await sandbox.close()
        return len(doomed)

    def happened(self, verb: Verb, attempt_id: str, detail: str = "") -> None:
        """Record a verb, and raise what was planted for it."""
        self.events.append(Event(verb, attempt_id, detail))
        for fault in self._faults:
            if fault.verb == verb and fault.attempt in (None, attempt_id) and fault.times > 0:
                fault.times -= 1
                raise fault.error


def _host_files(host: Path, inside: str) -> list[tuple[str, bytes]]:
    if host.is_file():
        return [(inside, host.read_bytes())]
    return [
        (f"{inside.rstrip('/')}/{path.relative_to(host).as_posix()}", path.read_bytes())
        for path in sorted(host.rglob("*"))
        if path.is_file()
    ]
