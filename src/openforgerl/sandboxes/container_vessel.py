"""What the host sees of a container and does to it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from openforgerl.errors import StageError, StoreError
from openforgerl.sandboxes.cgroups import Limits, limits_of
from openforgerl.sandboxes.container_engine import Engine
from openforgerl.sandboxes.container_records import BACKEND, ContainerRef
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.refs import members, start_time
from openforgerl.types import JsonValue, Origin, SandboxLimits, SandboxRef, Stage


class ContainerVessel:
    """`sandbox.Vessel` of one container."""

    def __init__(self, ref: ContainerRef, engine: Engine, state: Path, init_pid: int, seconds: float) -> None:
        self._ref = ref
        self.engine = engine
        self._state = state
        self.init_pid = init_pid
        self._seconds = seconds
        self._started = start_time(init_pid)
        self.limits: Limits = limits_of(init_pid)
        self.namespaces: dict[str, int] = {}

    @property
    def ref(self) -> SandboxRef:
        return self._ref.public()

    @property
    def gated(self) -> bool:
        """The engine has put the whole container into its group."""
        return False

    def admit(self, pid: int) -> None:
        del pid

    def memory_limit(self) -> int | None:
        """Bytes that its cgroup allows, as the kernel says; None without one."""
        return self.limits.memory

    def process_limit(self) -> int | None:
        return self.limits.processes

    def oom_kills(self) -> int:
        """By the cgroup's counter: podman itself says OOMKilled=false after a kill."""
        return self.limits.oom_kills()

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
    status, version = answer["status"], vessel.limits.version
    memory = f"cgroup v{version} {(vessel.memory_limit() or 0) >> 20} MB, tmpfs included"
    if watched:
        memory = f"RLIMIT_DATA {limits.memory_mb} MB per process, watchdog {limits.memory_mb} MB resident together"
    pids = vessel.process_limit()
    nproc = f"RLIMIT_NPROC {limits.processes}" if guards.process_limit else "none"
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
            "processes": f"cgroup v{version} {pids - 1}" if pids is not None else nproc,
            "disk": f"tmpfs {limits.disk_mb} MB each" if guards.disk_limit else "none",
            "open_files": f"RLIMIT_NOFILE {limits.open_files}",
            "cpu": f"RLIMIT_CPU {limits.cpu_seconds} s per process" if limits.cpu_seconds is not None else "none",
        },
    }
    if guards.off():
        report["guards_off"] = list(guards.off())
    return report
