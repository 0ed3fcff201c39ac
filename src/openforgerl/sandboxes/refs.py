"""What is written down about each sandbox, so that it can be found and destroyed after any crash."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from openforgerl.errors import StoreError
from openforgerl.sandboxes.cgroups import destroy
from openforgerl.types import JsonValue, SandboxRef

BACKEND = "process"


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sandbox. A pid counts only with its start time (clock ticks since boot) and the boot's id."""

    run_id: str
    attempt_id: str
    token: str
    boot_id: str
    cgroups: list[str] = []
    processes: dict[str, int] = {}
    """Host pid → start time: bubblewrap's own process and our init."""

    def path(self, folder: Path) -> Path:
        """Its file. An attempt may have several sandboxes (grading takes a fresh one), hence the token."""
        return folder / f"{quote(self.attempt_id, safe='')}.{self.token}.json"

    def save(self, folder: Path) -> None:
        """Write atomically."""
        target = self.path(folder)
        temporary = target.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(target)

    def public(self) -> SandboxRef:
        """As the protocol shows it."""
        detail: dict[str, JsonValue] = msgspec.to_builtins(self)
        return SandboxRef(backend=BACKEND, run_id=self.run_id, attempt_id=self.attempt_id, detail=detail)


def boot_id() -> str:
    """Changes with every boot, so that an old pid is never mistaken for a new process."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None when it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def load_all(folder: Path) -> list[ProcessRef]:
    """Every sandbox written down. Raises StoreError for a damaged file."""
    refs: list[ProcessRef] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            refs.append(msgspec.json.decode(path.read_bytes(), type=ProcessRef))
        except FileNotFoundError:
            continue  # closed meanwhile
        except msgspec.DecodeError as error:
            raise StoreError(f"{path}: not a sandbox record: {error}; delete it when no sandbox runs") from error
    return refs


def reap(ref: ProcessRef, folder: Path, *, seconds: float, settle: float = 0.0) -> None:
    """Kill the sandbox, remove its groups and its record. Blocking. Raises StoreError when it will not die.

    `settle`: where no process was recorded, wait so long for one that its killed owner had just spawned.
    """
    end = time.monotonic() + seconds
    if not ref.processes and not _alive(ref):
        time.sleep(settle)
    while ref.boot_id == boot_id() and (alive := _alive(ref)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise StoreError(f"sandbox of attempt {ref.attempt_id}: processes {alive} do not die after SIGKILL")
        time.sleep(0.005)
    try:
        destroy([Path(path) for path in ref.cgroups])
    except OSError as error:
        raise StoreError(f"sandbox of attempt {ref.attempt_id}: cannot remove {ref.cgroups}: {error}") from error
    ref.path(folder).unlink(missing_ok=True)


def _alive(ref: ProcessRef) -> list[int]:
    """Its live processes. Before they are recorded they are found by the token in their command lines.

    That is no nicety: bubblewrap's child, when its parent is killed in the first milliseconds, waits for ever.
    """
    if ref.processes:
        return [int(pid) for pid, start in ref.processes.items() if start_time(int(pid)) == start]
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if ref.token.encode() in words and start_time(int(name)) is not None:
                    found.append(int(name))
    return found


def sweep(folder: Path, *, older_than: float = 10.0) -> None:
    """Remove half-written records that a killed process left."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()


def members(namespace: int) -> list[int]:
    """Host pids of all live processes in the pid namespace with that inode, seen from outside it."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                inode = os.stat(f"/proc/{name}/ns/pid").st_ino
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended, or it is another user's and so not in a namespace of ours
            if inode == namespace and start_time(int(name)) is not None:
                found.append(int(name))
    return found


def child_with(parent: int, inside: int) -> int:
    """Host pid of the child of `parent` whose pid in its own, innermost namespace is `inside`.

    Raises ProcessLookupError when there is none.
    """
    for name in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{name}/status").read_text(errors="replace")
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if int(numbers.split()[-1]) == inside:
                return int(name)
    raise ProcessLookupError(f"no child of process {parent} has the pid {inside} inside")
