"""The process backend: bubblewrap, our init as PID 1, limits by cgroup or by rlimit and watchdog.

What holds and why is in `docs/decisions/0003-process-sandbox.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.bubblewrap import find_bwrap, system_python
from openforgerl.sandboxes.channel import Channel
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.launch import Launched, Program, compile_init, launch
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.refs import (
    BACKEND,
    ProcessRef,
    boot_id,
    child_with,
    load_all,
    members,
    reap,
    start_time,
    sweep,
)
from openforgerl.sandboxes.sandbox import LiveSandbox
from openforgerl.sandboxes.spec import AGENT_UID, check_spec, init_settings
from openforgerl.types import JsonValue, Origin, SandboxLimits, SandboxRef, SandboxSpec, Stage


class ProcessSandboxes:
    """`protocols.Sandboxes` on this machine. `state_dir` holds one small file for each living sandbox.

    `guards` is for tests only (see `guards.py`). Sandboxes die with the thread that runs the event loop.
    """

    def __init__(self, options: SandboxOptions, state_dir: Path, *, guards: Guards | None = None) -> None:
        self._options = options
        self._state = state_dir
        self._guards = guards or Guards()
        self._program: Program | None = None
        self._hierarchy: cgroups.Hierarchy | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def create(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[LiveSandbox]:
        """A running sandbox with `spec.files` in place; closed at the end, whatever happens.

        Raises InputError for a spec that cannot be, StageError (infrastructure) when the machine refuses.
        """
        check_spec(spec)
        program = await self._prepared()
        sandbox = await self._start(program, spec, attempt_id)
        try:
            if spec.endpoint is not None:
                await sandbox.forward(spec.endpoint)
            for target, source in spec.files.items():
                await sandbox.write_tree(Path(source), target)
            yield sandbox
        finally:
            await sandbox.close()

    async def list(self, run_id: str) -> Sequence[SandboxRef]:
        """Every sandbox of the run that is written down, whoever made it."""
        return [ref.public() for ref in load_all(self._state) if ref.run_id == run_id]

    async def reap(self, run_id: str) -> int:
        """Destroy every sandbox of the run; how many there were. Raises StoreError when one will not die."""
        found = [ref for ref in load_all(self._state) if ref.run_id == run_id]
        for ref in found:
            await asyncio.to_thread(reap, ref, self._state, seconds=self._options.kill_timeout, settle=0.2)
        sweep(self._state)
        return len(found)

    async def _prepared(self) -> Program:
        async with self._starting:
            if self._program is None:
                bwrap, python = find_bwrap(self._options.bwrap), system_python()
                self._state.mkdir(parents=True, exist_ok=True)
                self._hierarchy = None if self._options.cgroups == "off" else cgroups.detect()
                if self._hierarchy is None and self._options.cgroups == "require":
                    raise InputError('sandbox.cgroups = "require", but no cgroup is writable here: use "auto"')
                init = await asyncio.to_thread(compile_init, python)
                self._program = Program(bwrap=bwrap, python=python, init=init)
            return self._program

    async def _start(self, program: Program, spec: SandboxSpec, attempt_id: str) -> LiveSandbox:
        guards, token = self._guards, secrets.token_hex(6)
        group = cgroups.Group(self._hierarchy, f"openforgerl-{token}") if self._hierarchy else None
        ref = ProcessRef(
            run_id=spec.run_id,
            attempt_id=attempt_id,
            token=token,
            boot_id=boot_id(),
            cgroups=[str(path) for path in group.directories] if group else [],
        )
        ref.save(self._state)  # before anything exists, so that nothing can exist unrecorded
        launched: Launched | None = None
        channel: Channel | None = None
        try:
            watched = guards.memory_limit and (group is None or group.memory is None)
            launched = await launch(
                program, spec, guards, token=token, forbid_memory_files=watched, timeout=self._options.start_timeout
            )
            pids = (launched.process.pid, launched.init_pid)
            ref.processes.update({str(pid): started for pid in pids if (started := start_time(pid)) is not None})
            ref.save(self._state)
            if group is not None:
                group.make(spec.limits, memory=guards.memory_limit, processes=guards.process_limit)
            vessel = ProcessVessel(ref, launched, group, self._state, self._options.kill_timeout)
            channel = await Channel.over(launched.control)
            sandbox = LiveSandbox(spec, vessel, channel, self._options, guards, listener=launched.listener)
            answer = await sandbox.begin(init_settings(spec, guards, watched=watched))
            # bubblewrap tells of every namespace but this one
            launched.namespaces["user"] = answer["namespaces"]["user"]
            sandbox.describe(_described(launched, spec.limits, group, watched, guards))
        except BaseException:
            if channel is not None:
                await channel.close()
            if launched is not None:
                launched.control.close()
                launched.listener.close()
                with contextlib.suppress(ProcessLookupError):
                    launched.process.kill()
                await launched.process.wait()
            reap(ref, self._state, seconds=self._options.kill_timeout)
            raise
        return sandbox


class ProcessVessel:
    """`sandbox.Vessel` of one bubblewrap."""

    def __init__(self, ref: ProcessRef, launched: Launched, group: cgroups.Group | None, state: Path, seconds: float):
        self._ref = ref
        self._launched = launched
        self._group = group
        self._state = state
        self._seconds = seconds

    @property
    def ref(self) -> SandboxRef:
        return self._ref.public()

    @property
    def gated(self) -> bool:
        return self._group is not None

    def admit(self, pid: int) -> None:
        """Put a program that init has forked, and that waits, into the group. Init itself stays outside.

        Were it inside, an agent of many small processes could have the kernel choose init when memory runs out.
        """
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):  # killed while it waited
                self._group.add(child_with(self._launched.init_pid, pid))

    def oom_kills(self) -> int:
        return self._group.oom_kills() if self._group is not None else 0

    def survivors(self) -> str:
        seen = members(self._launched.namespaces["pid"])
        expected = self._launched.init_pid
        return "" if seen == [expected] else f"the host sees pids {seen}, expected only {expected}"

    async def obituary(self) -> StageError:
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

    async def destroy(self) -> None:
        process = self._launched.process
        try:
            async with asyncio.timeout(2.0):
                await process.wait()
        except TimeoutError:
            process.kill()  # --die-with-parent takes init along
            await process.wait()
        await asyncio.to_thread(reap, self._ref, self._state, seconds=self._seconds)


def _described(
    launched: Launched, limits: SandboxLimits, group: cgroups.Group | None, watched: bool, guards: Guards
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
