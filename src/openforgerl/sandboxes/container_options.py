"""Settings of the backend `container`."""

from __future__ import annotations

import msgspec


class ContainerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine, which image, and what a container may use."""

    engine: str | None = None
    """`podman`, `docker` or a program that takes the same command line; None = the first of the two on PATH."""
    image: str = ""
    """Image of a task that names none; empty = the base image of `openforgerl images build`."""
    replace_from: bool = False
    """Build tasks' Dockerfiles on that image instead of the one in their FROM, which no registry may have here."""
    cpus: float | None = None
    """Cores of one container; None = as many as it likes."""
    parallel: int = 4
    """Most commands to the engine at once: it locks its own state, and slows down beyond a few."""
    runtime_class: str | None = None
    """OCI runtime that the engine is told to use (`runsc` for gVisor); None = its own choice, or `runc` where that
    cannot run."""

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError(f"sandbox.container.parallel must be 1 or more; got {self.parallel}")
        if self.cpus is not None and self.cpus <= 0:
            raise ValueError(f"sandbox.container.cpus must be above 0; got {self.cpus}")
