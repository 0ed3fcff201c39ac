"""What a sandbox is made of and how a program in it ended."""

from __future__ import annotations

import msgspec

from openforgerl.types.messages import JsonValue


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A read-only directory given at creation (a harness's installation). `digest` identifies its content."""

    source: str
    """Host directory (process backend) or image reference."""
    target: str
    """Absolute path inside the sandbox."""
    digest: str = ""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on one sandbox."""

    memory_mb: int = 2048
    processes: int = 256
    disk_mb: int = 256
    """Size of each writable tmpfs (home, work directory, /tmp)."""
    open_files: int = 4096
    cpu_seconds: int | None = None


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to create. The same paths in every sandbox, so that prompts share their prefix."""

    run_id: str
    image: str = ""
    """Image whose root it gets, where the backend has images; empty = the backend's own choice."""
    workdir: str = "/workspace"
    home: str = "/home/agent"
    layers: tuple[Layer, ...] = ()
    files: dict[str, str] = {}
    """Absolute path inside → host file or directory copied in at creation (task environment)."""
    scratch: tuple[str, ...] = ()
    """Further absolute directories that get a writable, size-limited tmpfs (a verifier's /logs and /tests)."""
    env: dict[str, str] = {}
    limits: SandboxLimits = SandboxLimits()
    endpoint: tuple[str, int] | str | None = None
    """The proxy's data port, the only thing reachable from inside: a host address, or the path of a Unix socket (one
    that begins with NUL is in the abstract namespace)."""
    endpoint_port: int = 8080
    """Port inside the sandbox that leads to `endpoint`."""
    endpoint_host: str = "127.0.0.1"
    """Address of that port inside: its own loopback, or the proxy's address where sandboxes have a network."""


class SandboxRef(msgspec.Struct, frozen=True, kw_only=True):
    """Enough JSON to find (adopt or reap) a sandbox after a restart."""

    backend: str
    run_id: str
    attempt_id: str
    detail: dict[str, JsonValue] = {}


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a program in a sandbox ended."""

    code: int | None
    """Exit status; None when killed by a signal."""
    signal: int | None = None
    stdout: bytes = b""
    """Last bytes, bounded."""
    stderr: bytes = b""
    timed_out: bool = False
    oom: bool = False
    """The memory limit killed something inside."""
    seconds: float = 0.0
