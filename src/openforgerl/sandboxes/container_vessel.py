"""What the host sees of a container and does to it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from openforgerl.errors import StageError, StoreError
from openforgerl.sandboxes.cgroups import Group, Limits, limits_of
from openforgerl.sandboxes.container_engine import Engine
from openforgerl.sandboxes.container_records import BACKEND, ContainerRef
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.refs import child_with, members, start_time
from openforgerl.types import JsonValue, Origin, SandboxLimits, SandboxRef, Stage


class ContainerVessel:
    """`sandbox.Vessel` of one container."""

    def __init__(
        self, ref: ContainerRef, engine: Engine, state: Path, init_pid: int, group: Group | None, seconds: float
    ) -> None:
        """`group`: of ours, for the agent's programs; without one the engine's limits are for init as well."""
        self._ref = ref
        self.engine = engine
        self._state = state
        self.init_pid = init_pid
        self.group = group
        self._seconds = seconds
        self._started = start_time(init_pid)
        self.engine_limits: Limits = limits_of(init_pid)
        self.namespaces: dict[str, int] = {}

    @property
    def ref(self) -> SandboxRef:
        return self._ref.public()

    @property
    def gated(self) -> bool:
        return self.group is not None

    def admit(self, pid: int) -> None:
        """Put a program that init has forked, and that waits, into our group. Init stays in the engine's.

        Were they together, an agent of many small processes could have the kernel choose init when memory runs out,
        and so turn its own failure into ours.
        """
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):  # killed while it waited
                self.group.add(child_with(self.init_pid, pid))

    @property
    def memory_bounded(self) -> bool:
        """Whether a cgroup bounds the agent's memory."""
        return (self.group is not None and self.group.memory is not None) or self.engine_limits.memory is not None

    def oom_kills(self) -> int:
        """By the cgroups' counters: podman itself says OOMKilled=false after a kill."""
        return self.engine_limits.oom_kills() + (self.group.oom_kills() if self.group is not None else 0)

    def survivors(self) -> str:
        seen = members(self.namespaces["pid"])
        if self.init_pid not in seen:
            return ""  # an ordinary user may not look into an undumpable process, hence sees nobody
        return "" if seen == [self.init_pid] else f"the host sees pids {seen}, expected only {self.init_pid}"

    async def obituary(self) -> StageError:
        """From the engine's record of the end and the OOM counter, which outlives init as long as the group does."""
        kills = self.oom_kills()
        state: dict[str, Any] = {}
        for _ in range(20):
            code, out, _ = await self.engine.call("container", "inspect", self._ref.name)
            state = json.loads(out)[0]["State"] if code == 0 else {"Status": "removed by somebody"}
            if state.get("Status") not in ("running", "stopping", "created"):
                break
            await asyncio.sleep(0.1)
        status, code = state.get("Status"), state.get("ExitCode")
        _, out, err = await self.engine.call("logs", "--tail", "5", self._ref.name)
        said = f"status {status!r}, exit code {code}, {state.get('Error') or 'no error'}; it said: {(out + err)[-500:]}"
        if kills or state.get("OOMKilled"):
            return _ended("sandbox_oom", f"the container's memory ran out and its init ended with it ({said})")
        return _ended("sandbox_died", f"the container's init ended by itself ({said})")

    async def destroy(self) -> None:
        """Init ends at the end of its socket; what is left is killed and removed by the engine, and looked for."""
        await self.engine.remove(self._ref.name)
        end = time.monotonic() + self._seconds
        while start_time(self.init_pid) == self._started and self._started is not None:
            if time.monotonic() > end:
                raise StoreError(f"container {self._ref.name} is removed, but its init (pid {self.init_pid}) lives on")
            await asyncio.sleep(0.01)
        self._ref.forget(self._state)


def _ended(kind: str, message: str) -> StageError:
    return StageError(Stage.SANDBOX, kind, message, origin=Origin.INFRASTRUCTURE, retryable=True)


def described(
    answer: dict[str, Any],
    limits: SandboxLimits,
    vessel: ContainerVessel,
    watched: bool,
    guards: Guards,
    *,
    filtered: bool,
) -> dict[str, JsonValue]:
    """The report: what is in force, read back from the kernel where it can be."""
    status, group, theirs = answer["status"], vessel.group, vessel.engine_limits
    if watched:
        memory = f"RLIMIT_DATA {limits.memory_mb} MB per process, watchdog {limits.memory_mb} MB resident together"
    elif group is not None and group.memory is not None:
        memory = f"cgroup v{group.version} {limits.memory_mb} MB, tmpfs included"
    else:
        memory = f"cgroup v{theirs.version} {(theirs.memory or 0) >> 20} MB, tmpfs and init included"
    pids = f"RLIMIT_NPROC {limits.processes}"
    if group is not None and group.processes is not None:
        pids = f"cgroup v{group.version} {limits.processes}"
    elif theirs.processes is not None:
        pids = f"cgroup v{theirs.version} {theirs.processes - 1}"
    report: dict[str, JsonValue] = {
        "backend": BACKEND,
        "engine": f"{Path(vessel.engine.program).name} {vessel.engine.version}",
        "engine_settings": list(vessel.engine.cures),
        "namespaces": dict(vessel.namespaces),
        "uid": {"inside": int(status["Uid"].split()[0]), "host": os.stat(f"/proc/{vessel.init_pid}").st_uid},
        "capabilities": status["CapEff"],
        "no_new_privileges": status["NoNewPrivs"] == "1",
        "system_call_filter": filtered,
        "engine_filter": status["Seccomp"] == "2",
        "limits": {
            "memory": memory if guards.memory_limit else "none",
            "processes": pids if guards.process_limit else "none",
            "disk": f"tmpfs {limits.disk_mb} MB each" if guards.disk_limit else "none",
            "open_files": f"RLIMIT_NOFILE {limits.open_files}",
            "cpu": f"RLIMIT_CPU {limits.cpu_seconds} s per process" if limits.cpu_seconds is not None else "none",
        },
    }
    if guards.off():
        report["guards_off"] = list(guards.off())
    return report
