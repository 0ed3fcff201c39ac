"""Control groups, version 1 and 2: memory and process limits of one sandbox, where this machine lets us."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from openforgerl.types import SandboxLimits

_CONTROLLERS = {"memory": "memory.max", "pids": "pids.max"}
"""Of version 2, each with a file that a group has by it."""


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """Where groups can be made. In version 2 both directories are the same, where both controllers are to be had."""

    version: int
    memory: Path | None
    processes: Path | None


def detect() -> Hierarchy | None:
    """The writable place for groups of this process, tried by making one; None when there is none."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    own = dict(_own_groups())
    for _, target, kind, *_ in mounts:
        if kind == "cgroup2":
            top, mine = Path(target), Path(target + own.get("", "/"))
            # Beside us rather than below: where processes are, no group may have controllers for its children.
            places = [mine, *([mine.parent] if mine != top else []), top]
            has = {base: _controlled(base, _CONTROLLERS) for base in places}
            base = max(places, key=lambda place: len(has[place]))
            if has[base]:
                memory, processes = (base if name in has[base] else None for name in ("memory", "pids"))
                return Hierarchy(version=2, memory=memory, processes=processes)
    found: dict[str, Path] = {}
    for _, target, kind, options, *_ in mounts:
        for name, file in (("memory", "memory.limit_in_bytes"), ("pids", "pids.max")):
            if kind == "cgroup" and name in options.split(","):
                for base in (Path(target + own.get(name, "/")), Path(target)):
                    if name not in found and _usable(base, file):
                        found[name] = base
    if not found:
        return None
    return Hierarchy(version=1, memory=found.get("memory"), processes=found.get("pids"))


def _own_groups() -> list[tuple[str, str]]:
    """(controller, path) of this process; the controller of version 2 is the empty word."""
    return _groups_of("self")


def _groups_of(pid: str) -> list[tuple[str, str]]:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    return [(name, path) for _, names, path in lines for name in names.split(",")]


def _controlled(base: Path, files: Mapping[str, str]) -> set[str]:
    """Controllers (of those in `files`, each with a file that it brings) that a group made in `base` has.

    They are switched on for it where nobody did and we may.
    """
    found = {name for name, file in files.items() if _usable(base, file)}
    offered = base / "cgroup.controllers"
    missing = sorted((set(files) - found) & set(offered.read_text().split())) if offered.exists() else []
    if missing:
        with contextlib.suppress(OSError):  # it is not ours, or processes are in it
            (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
            found = {name for name, file in files.items() if _usable(base, file)}
    return found


def _usable(base: Path, file: str) -> bool:
    probe = base / f"openforgerl-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return (probe / file).exists()
    finally:
        probe.rmdir()


class Group:
    """The group of one sandbox."""

    def __init__(self, hierarchy: Hierarchy, name: str) -> None:
        self.version = hierarchy.version
        self.memory = hierarchy.memory / name if hierarchy.memory else None
        self.processes = hierarchy.processes / name if hierarchy.processes else None

    @property
    def directories(self) -> list[Path]:
        """Every directory that `make` creates."""
        return sorted({path for path in (self.memory, self.processes) if path is not None})

    def make(self, limits: SandboxLimits, *, memory: bool = True, processes: bool = True) -> None:
        """Create it with its limits in force. Raises OSError."""
        for path in self.directories:
            path.mkdir(exist_ok=True)
        size = str(limits.memory_mb << 20)
        if self.memory is not None and memory:
            names = ("memory.max",) if self.version == 2 else ("memory.limit_in_bytes",)
            swap = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", size)
            for name in names:
                (self.memory / name).write_text(size)
            if (self.memory / swap[0]).exists():
                (self.memory / swap[0]).write_text(swap[1])
        if self.processes is not None and processes:
            (self.processes / "pids.max").write_text(str(limits.processes))

    def add(self, pid: int) -> None:
        """Move a single-threaded process in; its later children follow. One that has ended is no error."""
        for path in self.directories:
            with contextlib.suppress(ProcessLookupError):
                (path / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed in it."""
        if self.memory is None:
            return 0
        return _counted(self.memory / ("memory.events" if self.version == 2 else "memory.oom_control"))


def _counted(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0  # swept by somebody else together with the sandbox
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def destroy(directories: list[Path], *, seconds: float = 5.0) -> None:
    """Kill what is in the groups and remove them. Raises OSError when one will not go."""
    end = time.monotonic() + seconds
    for path in directories:
        while path.exists():
            for line in _members(path):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
            try:
                path.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > end:
                    raise
                time.sleep(0.005)


def _members(path: Path) -> list[str]:
    try:
        return (path / "cgroup.procs").read_text().split()
    except FileNotFoundError:
        return []


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel says of the groups that somebody else has put a process into."""

    version: int = 0
    memory: int | None = None
    """Bytes; None = no limit of its own."""
    processes: int | None = None
    directory: Path | None = None
    """Where memory is counted."""

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed; 0 once the group is gone."""
        if self.directory is None:
            return 0
        return _counted(self.directory / ("memory.events" if self.version == 2 else "memory.oom_control"))


def limits_of(pid: int) -> Limits:
    """The limits in force for `pid`, read from the cgroup file system as it is mounted here; none when it has ended."""
    try:
        groups = dict(_groups_of(str(pid)))
    except (FileNotFoundError, ProcessLookupError):
        return Limits()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found: dict[str, tuple[Path, int | None, int]] = {}
    for _, target, kind, options, *_ in mounts:
        for name, file in (("memory", "memory.limit_in_bytes"), ("pids", "pids.max")):
            if kind == "cgroup" and name in options.split(",") and name in groups:
                directory = Path(target + groups[name])
                found[name] = (directory, _number(directory / file), 1)
            elif kind == "cgroup2" and name not in found:
                directory = Path(target + groups.get("", "/"))
                if (directory / f"{name}.max").exists():
                    found[name] = (directory, _number(directory / f"{name}.max"), 2)
    memory, processes = found.get("memory"), found.get("pids")
    return Limits(
        version=memory[2] if memory else processes[2] if processes else 0,
        memory=memory[1] if memory else None,
        processes=processes[1] if processes else None,
        directory=memory[0] if memory else None,
    )


def _number(file: Path) -> int | None:
    """A limit; None for none (version 1 says so with a number beyond any memory)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" or int(text) >= 1 << 60 else int(text)
