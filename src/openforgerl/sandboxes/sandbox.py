"""One running sandbox, as `protocols.Sandbox` wants it: the same for every backend that has our init inside.

Backends differ in how init is started and in what the host can see and do around it; that is a `Vessel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from openforgerl.errors import InputError, StageError, StoreError
from openforgerl.sandboxes.channel import MOST_STDIN, Channel, Gone, Unsound
from openforgerl.sandboxes.forward import Forwarder
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.spec import AGENT_PATH
from openforgerl.sandboxes.transfer import Tree, pieces, walk
from openforgerl.types import Exit, JsonValue, Origin, SandboxRef, SandboxSpec, Stage

log = logging.getLogger(__name__)

_ANSWER_GRACE = 15.0
"""Seconds that init may take beyond a program's own timeout before the sandbox counts as broken."""
_SILENCE = 120.0
"""Seconds without a frame of an export, beyond a connection's patience, after which the sandbox counts as broken."""

Told = TypeVar("Told")


class _Ended(msgspec.Struct, frozen=True):
    """How init says that a program ended. `stdout`: bytes of its output that are standard output."""

    code: int | None
    signal: int | None
    stdout: int
    timed_out: bool
    oom: bool
    seconds: float


class _Killed(msgspec.Struct, frozen=True):
    survivors: list[tuple[int, str, str]]


class _Exported(msgspec.Struct, frozen=True):
    skipped: list[tuple[str, str]]
    skipped_more: int = 0


class Vessel(Protocol):
    """What one backend knows of one sandbox and does to it from outside."""

    @property
    def ref(self) -> SandboxRef:
        """Enough to destroy or adopt it after a restart."""
        ...

    @property
    def gated(self) -> bool:
        """Whether a forked program waits until `admit` has put it where it is counted."""
        ...

    def admit(self, pid: int) -> None:
        """Count the program whose pid inside is `pid`."""
        ...

    def oom_kills(self) -> int:
        """How many processes its memory limit has killed, as the host counts; 0 where the host cannot see."""
        ...

    def survivors(self) -> str:
        """What the host sees alive in it beyond init, in words; empty when nothing, or when it cannot look."""
        ...

    async def obituary(self) -> StageError:
        """Why it ended, when nobody closed it. May take a few seconds to find out."""
        ...

    async def destroy(self) -> None:
        """Leave nothing of it: no process, mount, group, object or record. Raises StageError, StoreError."""
        ...


class LiveSandbox:
    """`protocols.Sandbox`, and beyond it `take_listener` and `write_tree`."""

    def __init__(
        self,
        spec: SandboxSpec,
        vessel: Vessel,
        channel: Channel,
        options: SandboxOptions,
        guards: Guards,
        *,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: the endpoint's socket inside, where the backend can hand it out."""
        self._spec = spec
        self._vessel = vessel
        self._channel = channel
        self._options = options
        self._guards = guards
        self._listener = listener
        self._forwarder: Forwarder | None = None
        self._closing: asyncio.Task[None] | None = None
        self._report: dict[str, JsonValue] = {}
        self._env = {
            "PATH": AGENT_PATH,
            "HOME": spec.home,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            **spec.env,
        }

    @property
    def ref(self) -> SandboxRef:
        """Enough to destroy it after a restart."""
        return self._vessel.ref

    @property
    def report(self) -> Mapping[str, JsonValue]:
        """Namespaces (inode numbers), uid, and every limit with what enforces it."""
        return self._report

    def take_listener(self) -> socket.socket:
        """The socket that already listens on 127.0.0.1:`spec.endpoint_port` inside; the caller serves and closes it.

        Once, and only when `spec.endpoint` is None (else it is served here). Raises InputError.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            raise InputError("the sandbox's listener is taken already, or spec.endpoint is set and it is served here")
        return listener

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
        """Run as the agent in `spec.workdir`, with nothing in the environment but ours, the spec's and `env`.

        Ends with the program itself; children that it leaves behind live on. On timeout, or when this call is
        cancelled, its whole tree is killed. A program that cannot be executed exits 127 or 126, with the reason
        on stderr. `key`: the name by which `claim` finds it after a restart. Raises InputError for bad arguments,
        StageError when the sandbox is gone.
        """
        if not argv or any("\0" in word for word in [*argv, *env, *env.values()]):
            raise InputError("exec: argv must not be empty, and no word of argv or env may hold a NUL character")
        if len(stdin) > MOST_STDIN or timeout <= 0:
            raise InputError(f"exec: stdin may have {MOST_STDIN} bytes, and timeout must be above 0")
        before = self._oom_kills()
        header: dict[str, JsonValue] = {
            "argv": list(argv),
            "env": {**self._env, **env},
            "cwd": self._spec.workdir,
            "timeout": timeout,
            "output_limit": output_limit,
            "gate": self._vessel.gated,
            "key": key,
        }
        answer, output = await self._call(
            "exec",
            header,
            stdin,
            timeout=timeout + _ANSWER_GRACE,
            most=2 * output_limit,
            started=self._vessel.admit,
        )
        return await self._exit(answer, output, oom=self._oom_kills() > before)

    async def claim(self, key: str) -> Exit:
        """How a program ended that whoever had this sandbox before us started with `key`; waits for it.

        As often as it is asked for. Raises InputError when there is none, StageError when the sandbox is gone.
        """
        try:
            answer, output = await self._live().claim(key)
        except Gone as error:
            raise await self._ruin(error) from error
        return await self._exit(answer, output, oom=False)

    async def read(self, path: str, *, limit: int) -> bytes:
        """A regular file's bytes. Raises FileNotFoundError; InputError for a link, another kind, or too large."""
        _, data = await self._call("read", {"path": path, "limit": limit}, most=limit)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file in the place of whatever file or link is there; missing directories are made."""
        step = 4 << 20
        for offset in range(0, max(len(data), 1), step):
            piece = data[offset : offset + step]
            await self._call("write", {"path": path, "offset": offset, "mode": mode}, piece)

    async def write_tree(self, source: Path, target: str) -> None:
        """Copy a host file or directory in, owned by the agent, execute bits kept. Raises InputError for links."""
        for path, file, mode in walk(source, target):
            if mode is None:
                await self._call("directory", {"path": path})
                continue
            async for offset, piece in pieces(file):
                await self._call("write", {"path": path, "offset": offset, "mode": mode}, piece)

    async def kill_agent(self) -> None:
        """SIGKILL to all but our init; proved by /proc inside and, independently, by the host's.

        Raises StageError(KILL) when something lives on.
        """
        timeout = self._options.kill_timeout
        header: dict[str, JsonValue] = {"timeout": timeout, "complete": self._guards.complete_kill}
        answer, _ = await self._call("kill", header, timeout=timeout + _ANSWER_GRACE)
        if not self._guards.complete_kill:
            return
        survivors, seen = (await self._told(answer, _Killed)).survivors, self._vessel.survivors()
        if survivors or seen:
            raise StageError(
                Stage.KILL,
                "survivors",
                f"after SIGKILL to all, these processes live: {survivors}; {seen or 'the host sees none'}",
                origin=Origin.INFRASTRUCTURE,
                retryable=True,
            )

    async def export(self, paths: Sequence[str], destination: Path, *, limit: int) -> None:
        """Copy declared paths to `destination` (new or empty), each under its full path inside.

        Regular files and directories only; what else was met is in `report["export_skipped"]`, and a path
        that does not exist is simply absent. Modes become 0755 or 0644. `limit` in bytes over all files.
        Raises StageError(VERIFY, too_large), of the policy's making, above it.
        """
        modes = 0o777 if self._guards.plain_files else 0o7777
        most = self._options.export_entries
        tree = Tree(destination, limit=limit, entries=most, modes=modes)
        header: dict[str, JsonValue] = {"paths": _outermost(paths), "limit": limit, "most": most}
        longest = _SILENCE + (self._channel.patience or 0.0)
        loop, silence = asyncio.get_running_loop(), asyncio.timeout(longest)
        try:
            async with silence, contextlib.aclosing(self._live().stream("export", header)) as frames:
                async for frame, data in frames:
                    silence.reschedule(loop.time() + longest)
                    if frame.get("restart"):
                        tree.restart()
                        continue
                    tree.take(frame, data)
                    if frame.get("done"):
                        told = await self._told(frame, _Exported)
                        self._report["export_skipped"] = [list(pair) for pair in told.skipped]
                        if told.skipped_more:
                            self._report["export_skipped_more"] = told.skipped_more
        except Gone as error:
            raise await self._ruin(error) from error
        except TimeoutError as error:
            if not silence.expired():
                raise
            raise await self._hung("export", longest) from error
        finally:
            tree.end()

    async def forward(self, address: tuple[str, int] | str) -> None:
        """Serve the endpoint by forwarding bytes to the proxy. Called by `create` for `spec.endpoint`."""
        self._forwarder = Forwarder(address, self._options.max_connections)
        await self._forwarder.start(self.take_listener())

    async def close(self) -> None:
        """End it: no process, mount, cgroup or record stays. Idempotent; finishes even when cancelled.

        Raises StageError, StoreError when something stays: its record does too, for the reaper, and another call
        tries again.
        """
        closing = self._closing
        if closing is None or (closing.done() and not closing.cancelled() and closing.exception() is not None):
            closing = self._closing = asyncio.create_task(self._close())
        await asyncio.shield(closing)

    async def begin(self, settings: dict[str, JsonValue]) -> dict[str, Any]:
        """Hand init its settings (`spec.init_settings`); its answer. Called once, by the backend."""
        answer, _ = await self._call("start", settings)
        return answer

    def describe(self, report: dict[str, JsonValue]) -> None:
        """Set what `report` shows. Called by the backend."""
        self._report = report

    async def _call(
        self,
        op: str,
        header: dict[str, JsonValue],
        payload: bytes = b"",
        *,
        timeout: float = 60.0,
        most: int = 0,
        started: Callable[[int], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One command with a deadline of ours: an init that does not answer ends the sandbox."""
        try:
            async with asyncio.timeout(timeout):
                return await self._live().call(op, header, payload, most=most, started=started)
        except Gone as error:
            raise await self._ruin(error) from error
        except TimeoutError as error:
            raise await self._hung(op, timeout) from error

    async def _ruin(self, error: Gone) -> StageError:
        """Why the sandbox is no more. One whose init cannot be trusted is destroyed."""
        if not isinstance(error, Unsound):
            return await self._vessel.obituary()
        await self._give_up()
        text = f"the sandbox's init said what no init of ours says ({error}); the sandbox is destroyed"
        return StageError(Stage.SANDBOX, "init_unsound", text, origin=Origin.INFRASTRUCTURE, retryable=True)

    async def _hung(self, op: str, seconds: float) -> StageError:
        await self._give_up()
        text = f"the sandbox's init did not answer {op!r} within {seconds:.0f} s; the sandbox is destroyed"
        return StageError(Stage.SANDBOX, "sandbox_hangs", text, origin=Origin.INFRASTRUCTURE, retryable=True)

    async def _give_up(self) -> None:
        """Close it. That something stays is told again when its owner closes it, and hides no reason."""
        try:
            await self.close()
        except (StageError, StoreError) as error:
            log.warning("sandbox of %s: %s", self.ref.attempt_id, error)

    async def _told(self, answer: dict[str, Any], kind: type[Told]) -> Told:
        """An answer as it should be. Raises StageError when it is not."""
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise await self._ruin(Unsound(str(error))) from error

    async def _exit(self, answer: dict[str, Any], output: bytes, *, oom: bool) -> Exit:
        told = await self._told(answer, _Ended)
        return Exit(
            code=told.code,
            signal=told.signal,
            stdout=output[: told.stdout],
            stderr=output[told.stdout :],
            timed_out=told.timed_out,
            oom=told.oom or oom,
            seconds=told.seconds,
        )

    def _live(self) -> Channel:
        if self._closing is not None:
            raise InputError(f"the sandbox of attempt {self.ref.attempt_id} is closed")
        return self._channel

    def _oom_kills(self) -> int:
        return self._vessel.oom_kills() if self._closing is None else 0

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._channel.close()  # init ends at the end of the stream, the kernel kills the rest with it
        await self._vessel.destroy()


def _outermost(paths: Sequence[str]) -> list[JsonValue]:
    """Without what lies in another of them, and would be sent twice."""
    clean = ["/" + "/".join(part for part in path.split("/") if part) for path in paths]
    return [
        path
        for at, path in enumerate(clean)
        if path not in clean[:at] and not any(path.startswith(other + "/") for other in clean)
    ]
