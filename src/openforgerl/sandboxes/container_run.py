"""The command line of one container, and the meeting with its init over a socket in a mounted directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Generator
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.sandboxes.container_engine import Engine, failed, rootless
from openforgerl.sandboxes.container_records import ContainerRef
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.runtime import Runtime, command
from openforgerl.sandboxes.spec import AGENT_UID, HOSTNAME, INIT_HOME, fixed_files, writable_directories
from openforgerl.types import SandboxSpec

LABEL = "openforgerl.run"
_CONTROL = "/.openforgerl-control"
_SOCKET = "s"
_INIT_MB = 128
_CREDENTIALS = struct.Struct("iII")


def run_words(
    engine: Engine, spec: SandboxSpec, ref: ContainerRef, runtime: Runtime, image: str, folder: Path, guards: Guards
) -> list[str]:
    """Everything between `run` and the end. `image` by its id: what the report names is what runs.

    Where the agent has a group of ours, the engine's memory limit is only init's: the files that go in count there.
    """
    limits = spec.limits
    memory = limits.memory_mb
    if ref.cgroups:
        memory = _INIT_MB + limits.disk_mb * len(writable_directories(spec))
    words = ["--detach", "--pull", "never", "--name", ref.name, "--hostname", HOSTNAME]
    words += ["--label", f"{LABEL}={spec.run_id}", "--label", f"openforgerl.attempt={ref.attempt_id}"]
    words += ["--network", "none" if guards.own_network else "host"]
    words += _identity(engine, guards)
    if guards.memory_limit:
        words += ["--memory", f"{memory}m", "--memory-swap", f"{memory}m"]
    words += ["--pids-limit", str(limits.processes + 1 if guards.process_limit else -1)]  # init counts
    words += ["--cpus", str(engine.options.cpus)] if engine.options.cpus is not None else []
    size = limits.disk_mb if guards.disk_limit else None
    words += ["--shm-size", f"{limits.disk_mb if guards.disk_limit else 4096}m"]
    for path in writable_directories(spec):
        mode = "1777" if path == "/tmp" else "0755"
        keep = bool(spec.image) and path == spec.workdir and path not in spec.files
        words += engine.writable(path, megabytes=size, mode=mode, uid=AGENT_UID, keep=keep)
    mounts = {str(runtime.path): INIT_HOME, str(folder / "control"): _CONTROL}
    mounts |= {str(folder / "etc" / Path(path).name): path for path in fixed_files(spec)}
    words += [word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}:ro")]
    for layer in spec.layers:
        if ":" in layer.source:
            raise InputError(f"sandbox layer: {layer.source}: a colon cannot stand in a mounted path")
        words += ["--volume", f"{layer.source}:{layer.target}:ro"]
    words += [] if guards.hidden_host else ["--volume", "/:/host:ro"]
    entry, *arguments = command(
        "connect", f"{_CONTROL}/{_SOCKET}", str(spec.endpoint_port), str(int(guards.undumpable))
    )
    return [*words, "--entrypoint", entry, image, *arguments, ref.token]


def _identity(engine: Engine, guards: Guards) -> list[str]:
    """Who the container is, and what its root may be used for."""
    words = ["--read-only"] if guards.read_only else []
    if engine.podman:
        words += ["--read-only-tmpfs=false", "--http-proxy=false", "--systemd=false"]
        if rootless():
            words += [f"--userns=keep-id:uid={AGENT_UID},gid={AGENT_UID}"]
    if guards.no_capabilities:
        words += ["--user", f"{AGENT_UID}:{AGENT_UID}", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    else:
        words += ["--user", "0:0", "--cap-add", "ALL"]
    words += [] if guards.seccomp else ["--security-opt", "seccomp=unconfined"]
    return words


@contextlib.contextmanager
def serve_directory(folder: Path, spec: SandboxSpec) -> Generator[socket.socket]:
    """What is mounted into the container, with the socket that its init connects to; the socket goes at the end.

    Only the container can get there: the folder above is closed to every other user of the host, and no agent runs
    before the socket is gone.
    """
    etc, control = folder / "etc", folder / "control"
    for path in (etc, control):
        path.mkdir()
        path.chmod(0o755)
    for path, content in fixed_files(spec).items():
        target = etc / Path(path).name
        target.write_bytes(content)
        target.chmod(0o644)
    directory = os.open(control, os.O_RDONLY | os.O_DIRECTORY)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.setblocking(False)
        short = f"/proc/self/fd/{directory}/{_SOCKET}"  # the run folder's own path may be longer than 107 bytes
        door.bind(short)
        os.chmod(short, 0o666)
        door.listen(1)
        yield door
    finally:
        door.close()
        (control / _SOCKET).unlink(missing_ok=True)
        os.close(directory)


async def meet(
    door: socket.socket, engine: Engine, ref: ContainerRef, timeout: float
) -> tuple[socket.socket, socket.socket, int]:
    """(control socket, the endpoint's listener inside, init's pid on the host). Raises StageError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            control, _ = await loop.sock_accept(door)
            readable = asyncio.Event()
            loop.add_reader(control.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(control.fileno())
    except TimeoutError as error:
        _, out, err = await engine.call("logs", ref.name)
        raise failed("start", f"the container's init said nothing in {timeout} s: {(out + err)[-500:]}") from error
    try:
        pid, _, _ = _CREDENTIALS.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        data, fds, _, _ = socket.recv_fds(control, 1, 4)
        if data != b"!" or len(fds) != 1:
            raise failed("start", "the container's init did not say hello: it ended at once")
    except BaseException:
        control.close()
        raise
    return control, socket.socket(fileno=fds[0]), pid
