"""What is written down about each container, so that it can be found and removed after any crash."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec

from openforgerl.errors import StoreError
from openforgerl.sandboxes.cgroups import destroy
from openforgerl.types import JsonValue, SandboxRef

BACKEND = "container"


class ContainerRef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One container: its record, and a folder of the same name with what is mounted into it."""

    run_id: str
    attempt_id: str
    token: str
    engine: str
    name: str
    cgroups: list[str] = []
    init_pid: int = 0
    """Our init's pid on the host; 0 until it has said hello."""

    def folder(self, state: Path) -> Path:
        """Its folder. An attempt may have several sandboxes (grading takes a fresh one), hence the token."""
        return state / f"{quote(self.attempt_id, safe='')}.{self.token}"

    def save(self, state: Path) -> None:
        """Write atomically; the folder is nobody's but ours."""
        folder = self.folder(state)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = folder / ".record.tmp"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / "record.json")

    def forget(self, state: Path) -> None:
        """Remove the groups, the record and the folder, once the container is gone. Raises StoreError."""
        try:
            destroy([Path(path) for path in self.cgroups])
        except OSError as error:
            raise StoreError(f"sandbox of attempt {self.attempt_id}: cannot remove {self.cgroups}: {error}") from error
        shutil.rmtree(self.folder(state), ignore_errors=True)

    def public(self) -> SandboxRef:
        """As the protocol shows it."""
        detail: dict[str, JsonValue] = msgspec.to_builtins(self)
        return SandboxRef(backend=BACKEND, run_id=self.run_id, attempt_id=self.attempt_id, detail=detail)


def load_containers(state: Path) -> list[ContainerRef]:
    """Every container written down. Raises StoreError for a damaged record."""
    refs: list[ContainerRef] = []
    for path in sorted(state.glob("*/record.json")) if state.is_dir() else []:
        try:
            refs.append(msgspec.json.decode(path.read_bytes(), type=ContainerRef))
        except FileNotFoundError:
            continue  # closed meanwhile
        except msgspec.DecodeError as error:
            raise StoreError(f"{path}: not a sandbox record: {error}; delete it when no container runs") from error
    return refs
