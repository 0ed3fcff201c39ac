"""One running process sandbox, as `protocols.Sandbox` wants it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes.bubblewrap import AGENT_PATH, AGENT_UID, writable_directories
from openforgerl.sandboxes.cgroups import Group
from openforgerl.sandboxes.channel import MOST_STDIN, Channel, Gone
from openforgerl.sandboxes.forward import Forwarder
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.launch import Launched
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.refs import BACKEND, ProcessRef, child_with, members, reap
from openforgerl.sandboxes.transfer import Tree, pieces, walk
from openforgerl.types import Exit, JsonValue, Origin, SandboxLimits, SandboxRef, SandboxSpec, Stage

_ANSWER_GRACE = 15.0
"""Seconds that init may take beyond a program's own timeout before the sandbox counts as broken."""
_INODES_PER_MB = 1024
_WATCH_SECONDS = (0.2, 1.0)
"""Between two looks of init's watchdog: when it bounds memory, and when only inodes."""


class ProcessSandbox:
    """`protocols.Sandbox`, and beyond it `take_listener` and `write_tree`."""

    def __init__(
        self,
        spec: SandboxSpec,
        ref: ProcessRef,
        launched: Launched,
        group: Group | None,
        options: SandboxOptions,
        guards: Guards,
        state: Path,
    ) -> None:
        self._spec = spec
        self._ref = ref
        self._launched = launched
        self._group = group
        self._options = options
        self._guards = guards
        self._state = state
        self._channel: Channel | None = None
        self._listener: socket.socket | None = launched.listener
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
        return self._ref.public()

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
    ) -> Exit:
        """Run as the agent in `spec.workdir`, with nothing in the environment but ours, the spec's and `env`.

        Ends with the program itself; children that it leaves behind live on. On timeout, or when this call is
        cancelled, its whole tree is killed. A program that cannot be executed exits 127 or 126, with the reason
        on stderr. Raises InputError for bad arguments, StageError when the sandbox is gone.
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
            "gate": self._group is not None,
        }
        answer, output = await self._call("exec", header, stdin, timeout=timeout + _ANSWER_GRACE, started=self._admit)
        return Exit(
            code=answer["code"],
            signal=answer["signal"],
            stdout=output[: answer["stdout"]],
            stderr=output[answer["stdout"] :],
            timed_out=answer["timed_out"],
            oom=answer["oom"] or self._oom_kills() > before,
            seconds=answer["seconds"],
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """A regular file's bytes. Raises FileNotFoundError; InputError for a link, another kind, or too large."""
        _, data = await self._call("read", {"path": path, "limit": limit})
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
        survivors = answer["survivors"]
        seen = members(self._launched.namespaces["pid"])
        if survivors or seen != [self._launched.init_pid]:
            raise StageError(
                Stage.KILL,
                "survivors",
                f"after SIGKILL to all, these processes live: {survivors}; the host sees pids {seen}, "
                f"expected only {self._launched.init_pid}",
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
        tree = Tree(destination, limit=limit, modes=modes)
        header: dict[str, JsonValue] = {"paths": list(paths), "limit": limit, "most": self._options.export_entries}
        try:
            async with contextlib.aclosing(self._live().stream("export", header)) as frames:
                async for frame, data in frames:
                    tree.take(frame, data)
                    if frame.get("done"):
                        self._report["export_skipped"] = frame["skipped"]
        except Gone as error:
            raise await self._died() from error
        finally:
            tree.end()

    async def forward(self, address: tuple[str, int] | str) -> None:
        """Serve the endpoint by forwarding bytes to the proxy. Called by `create` for `spec.endpoint`."""
        self._forwarder = Forwarder(address, self._options.max_connections)
        await self._forwarder.start(self.take_listener())

    async def close(self) -> None:
        """End it: no process, mount, cgroup or record stays. Idempotent; finishes even when cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def begin(self, watched: bool) -> None:
        """Hand init its limits and fill the report. Called once, by the backend."""
        self._channel = await Channel.over(self._launched.control)
        limits, guards = self._spec.limits, self._guards
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": limits.open_files}
        if guards.process_limit:
            rlimits["RLIMIT_NPROC"] = limits.processes + 1  # init counts
        if limits.cpu_seconds is not None:
            rlimits["RLIMIT_CPU"] = limits.cpu_seconds
        if watched:
            rlimits["RLIMIT_DATA"] = limits.memory_mb << 20
        header: dict[str, JsonValue] = {
            "rlimits": dict(rlimits),
            "plain_files": guards.plain_files,
            "writable": [*writable_directories(self._spec), "/dev/shm"],
            "most_inodes": limits.disk_mb * _INODES_PER_MB if guards.disk_limit else 0,
            "most_memory": limits.memory_mb << 20 if watched else None,
            "tick": _WATCH_SECONDS[0 if watched else 1],
        }
        answer, _ = await self._call("start", header)
        # bubblewrap tells of every namespace but this one
        self._launched.namespaces["user"] = answer["namespaces"]["user"]
        self._report = _describe(self._launched, limits, self._group, watched, guards)

    async def _call(
        self,
        op: str,
        header: dict[str, JsonValue],
        payload: bytes = b"",
        *,
        timeout: float = 60.0,
        started: Callable[[int], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One command with a deadline of ours: an init that does not answer ends the sandbox."""
        try:
            async with asyncio.timeout(timeout):
                return await self._live().call(op, header, payload, started=started)
        except Gone as error:
            raise await self._died() from error
        except TimeoutError as error:
            await self.close()
            raise StageError(
                Stage.SANDBOX,
                "sandbox_hangs",
                f"the sandbox's init did not answer {op!r} within {timeout:.0f} s; the sandbox is destroyed",
                origin=Origin.INFRASTRUCTURE,
                retryable=True,
            ) from error

    def _live(self) -> Channel:
        if self._channel is None or self._closing is not None:
            raise InputError(f"the sandbox of attempt {self._ref.attempt_id} is closed")
        return self._channel

    async def _died(self) -> StageError:
        """What to say when init is gone though nobody closed it."""
        process = self._launched.process
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await process.wait()
        return StageError(
            Stage.SANDBOX,
            "sandbox_died",
            f"the sandbox's init ended by itself (bubblewrap's exit status {process.returncode})",
            origin=Origin.INFRASTRUCTURE,
            retryable=True,
        )

    def _admit(self, pid: int) -> None:
        """Put a program that init has forked, and that waits, into the group. Init itself stays outside.

        Were it inside, an agent of many small processes could have the kernel choose init when memory runs out.
        """
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):  # killed while it waited
                self._group.add(child_with(self._launched.init_pid, pid))

    def _oom_kills(self) -> int:
        return self._group.oom_kills() if self._group is not None and self._closing is None else 0

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._channel is not None:
            await self._channel.close()  # init ends at the end of the stream, the kernel kills the rest with it
        process = self._launched.process
        try:
            async with asyncio.timeout(2.0):
                await process.wait()
        except TimeoutError:
            process.kill()  # --die-with-parent takes init along
            await process.wait()
        await asyncio.to_thread(reap, self._ref, self._state, seconds=self._options.kill_timeout)


def _describe(
    launched: Launched, limits: SandboxLimits, group: Group | None, watched: bool, guards: Guards
) -> dict[str, JsonValue]:
    """The report: what is in force, read back from the kernel where it can be."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{launched.init_pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    pids = f"RLIMIT_NPROC {limits.processes}" if guards.process_limit else "none"
    if group is not None and group.processes is not None and guards.process_limit:
        pids += f", cgroup v{group.version} {limits.processes}"
    if not guards.memory_limit:
        memory = "none"
    elif watched or group is None:
        memory = f"RLIMIT_DATA {limits.memory_mb} MB per process, watchdog {limits.memory_mb} MB resident together"
    else:
        memory = f"cgroup v{group.version} {limits.memory_mb} MB, tmpfs included"
    cpu = f"RLIMIT_CPU {limits.cpu_seconds} s per process" if limits.cpu_seconds is not None else "none"
    report: dict[str, JsonValue] = {
        "backend": BACKEND,
        "namespaces": dict(launched.namespaces),
        "uid": {"inside": AGENT_UID, "host": launched.host_uid},
        "capabilities": status["CapEff"],
        "no_new_privileges": status["NoNewPrivs"] == "1",
        "system_call_filter": status["Seccomp"] == "2",
        "limits": {
            "memory": memory,
            "processes": pids,
            "disk": f"tmpfs {limits.disk_mb} MB each" if guards.disk_limit else "none",
            "open_files": f"RLIMIT_NOFILE {limits.open_files}",
            "cpu": cpu,
        },
    }
    if guards.off():
        report["guards_off"] = list(guards.off())
    return report
