"""What the kubelet runs: images, containers, their logs and their ends."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TAIL_BYTES, TAIL_LINES = 2048, 80
"""What FallbackToLogsOnError takes of a log."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume's place in a container. `source` is a file or directory of the host.

    `memory`: an emptyDir in memory that no other container shares: a tmpfs of the container's own, of `size` bytes
    (0: no bound), in place of `source`. Mounted at two places it is two.
    """

    path: str
    source: Path
    read_only: bool
    memory: bool = False
    size: int = 0


class ContainerLog:
    """What a container printed, as the log endpoint returns it.

    When it is longer than `rotate_at` bytes, the kubelet rotates the file at its next look: the endpoint then
    returns nothing of what came before, and the rotated file stays on the node.
    """

    def __init__(self, rotate_at: int) -> None:
        self._rotate_at = rotate_at
        self._pieces: list[bytes] = []
        self._tail = b""
        self.written = 0
        self.rotated = 0
        """Bytes that went into rotated files."""
        self.news = asyncio.Event()
        self.ended = False

    def write(self, data: bytes) -> None:
        """Append."""
        self.written += len(data)
        self._pieces.append(data)
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._wake()

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the next look rotates it."""
        return self.written - self.rotated > self._rotate_at

    def rotate(self) -> None:
        """The kubelet's look."""
        if self.full:
            self.rotated = self.written
            self._pieces.clear()

    def read(self) -> bytes:
        """What the endpoint returns."""
        whole = b"".join(self._pieces)
        self._pieces = [whole]
        return whole

    def tail(self) -> str:
        """The last 2 kB or 80 lines, whichever is less."""
        text = self._tail.decode(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One container that is to run."""

    pod: Mapping[str, Any]
    name: str
    image: Image
    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    mounts: Sequence[Mount]
    log: ContainerLog
    termination_file: Path
    termination_path: str
    uid: int
    gid: int
    read_only: bool
    privileged: bool
    """Every capability, in a user namespace of its own; other containers have none."""
    memory: int
    """Limit in bytes; 0: none."""
    hostname: str
    network: str = ""
    """Path of the pod's network namespace; empty: this machine's."""
    host_uid: int = 0
    """Who the container's user is on this machine; 0: whoever we are."""

    def place(self, path: str) -> Path:
        """Where on the host the container's `path` lies; it must be in a volume. Raises FileNotFoundError."""
        for mount in sorted(self.mounts, key=lambda one: -len(one.path)):
            if path == mount.path or path.startswith(mount.path.rstrip("/") + "/"):
                return mount.source / path[len(mount.path) :].lstrip("/")
        raise FileNotFoundError(f"{path} is in no volume of container {self.name}")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container's first process ended. `oom`: the memory limit killed something in it."""

    code: int
    oom: bool = False


class StartRefused(Exception):
    """The runtime cannot start the container: StartError, exit code 128."""


class ExecProcess(Protocol):
    """A program that somebody runs in a container with exec."""

    async def read(self, stream: int, size: int) -> bytes:
        """Up to `size` bytes of stream 1 or 2; empty at its end."""
        ...

    async def write(self, data: bytes) -> None:
        """To its standard input; empty: close it."""
        ...

    async def wait(self) -> int:
        """Its exit code."""
        ...

    def kill(self) -> None:
        """End it and what it started."""
        ...


class Container(Protocol):
    """One running container."""

    @property
    def pid(self) -> int:
        """Of its first process on the host; 0 when it is none."""
        ...

    async def wait(self) -> Ended:
        """Until its first process ends."""
        ...

    def terminate(self) -> None:
        """SIGTERM to its first process."""
        ...

    def kill(self) -> None:
        """SIGKILL to all of it."""
        ...

    def kill_child(self) -> None:
        """SIGKILL to one process in it that is not the first, if there is one."""
        ...

    async def exec(self, argv: Sequence[str], *, stdin: bool) -> ExecProcess:
        """Run another program in it. Raises StartRefused."""
        ...


class Runtime(Protocol):
    """Starts containers."""

    async def start(self, launch: Launch) -> Container:
        """Raises StartRefused."""
        ...


Program = Callable[["ProgramContext"], Awaitable[int | None]]
"""A container's program as a coroutine: its result is the exit code, an exception exit code 1 with its traceback."""


@dataclass(slots=True)
class ProgramContext:
    """What a program of this process gets instead of a machine."""

    launch: Launch
    terminating: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at SIGTERM, for those who registered with `handles_term`; others are cancelled."""

    @property
    def env(self) -> Mapping[str, str]:
        """Its environment."""
        return self.launch.env

    @property
    def argv(self) -> Sequence[str]:
        """Command and arguments."""
        return self.launch.argv

    @property
    def pod(self) -> Mapping[str, Any]:
        """The pod as it was when its containers started."""
        return self.launch.pod

    def print(self, text: str) -> None:
        """A line of the container's log."""
        self.launch.log.write(text.encode() + b"\n")

    def place(self, path: str) -> Path:
        """Where on this machine a path in one of its volumes lies."""
        return self.launch.place(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image name stands for: directories of this machine, or a coroutine.

    `root`: path in the container → path here, read-only; None: the system directories of this machine. `program`: run
    this in our own process. `entrypoint` is used when the container names no command. `pull_seconds`: of the cluster.
    """

    root: Mapping[str, str] | None = None
    program: Program | None = None
    handles_term: bool = False
    entrypoint: Sequence[str] = ()
    pull_seconds: float = 0.0
    missing: bool = False
    """There is no such image: pulls fail for ever."""


def digest_of(image: str) -> str:
    """The imageID of an image name: the digest that it names, or one made of the name."""
    name, at, digest = image.partition("@")
    if not at:
        name, digest = image.rpartition(":")[0] or image, f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"
    return f"{name}@{digest}"
