"""The container engine's command line: podman, or docker where it takes the same words.

Not its API: that needs a daemon, and podman has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from openforgerl.errors import InputError, StageError, StoreError
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.refs import boot_id
from openforgerl.sandboxes.runtime import Runtime, cache_directory
from openforgerl.sandboxes.spec import INIT_HOME
from openforgerl.types import JsonValue, Origin, Stage

ENGINES = ("podman", "docker")


class Cure(msgspec.Struct, frozen=True):
    """A setting that lets an engine run on a machine where out of the box it cannot."""

    name: str
    symptom: str
    """Words of the engine's error, in lower case."""
    before: tuple[str, ...] = ()
    """Words before `run`."""
    after: tuple[str, ...] = ()
    """Words after `run`."""


_ULIMITS = ("--ulimit", "nofile={files}", "--ulimit", "nproc={processes}")


class Remembered(msgspec.Struct, frozen=True):
    """What an engine was found to need."""

    version: str
    cures: list[str]


CURES = (
    Cure("ulimits of our own", "error setting rlimit", after=_ULIMITS),
    Cure("ulimits of our own", "setrlimit", after=_ULIMITS),
    Cure("runtime runc", "cgroups in hybrid mode not supported", before=("--runtime", "runc")),
    Cure("runtime runc", 'default oci runtime "crun" not found', before=("--runtime", "runc")),
)
"""What podman 4.3 on Debian 12 needed inside a virtual machine with few rights. The only place that reads its words."""
_REMOVAL_PAUSES = (0.1, 0.5, 2.0)
"""Seconds before a removal is tried again."""
_MOST_FILES, _MOST_PROCESSES = 20_000, 32_768


class Engine:
    """Runs the engine's commands, a few at a time, and remembers what it needs on this machine."""

    def __init__(self, program: str, options: ContainerOptions) -> None:
        self.program = program
        self.options = options
        self.podman = Path(program).name.startswith("podman")
        self.version = ""
        self.cures: list[str] = []
        self._before = ["--runtime", options.runtime_class] if options.runtime_class else []
        self._after: list[str] = []
        self._places = asyncio.Semaphore(options.parallel)

    async def call(self, *words: str, timeout: float = 120.0) -> tuple[int, str, str]:
        """(exit status, stdout, stderr). Raises StageError (infrastructure) when the engine does not answer in time.

        Cancelled or late, the command is killed: what it had begun is the caller's to remove.
        """
        # files, not pipes: what an engine leaves running may hold a pipe open, and the end would never be seen
        async with self._places:
            with _memory() as out, _memory() as err:
                process = await asyncio.create_subprocess_exec(
                    self.program, *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd="/"
                )
                try:
                    async with asyncio.timeout(timeout):
                        code = await process.wait()
                except TimeoutError as error:
                    raise failed("engine", f"`{self.program} {words[0]}` gave no answer in {timeout:.0f} s") from error
                finally:
                    if process.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            process.kill()
                        await process.wait()
                return code, _text(out), _text(err).strip()

    async def run(self, *words: str, timeout: float) -> tuple[int, str, str]:
        """`run` with what this machine needs."""
        return await self.call(*self._before, "run", *self._after, *words, timeout=timeout)

    async def image(self, reference: str) -> dict[str, JsonValue]:
        """Its id, digests and variables, for the record. InputError naming the way to get it when it is not here."""
        code, out, err = await self.call("image", "inspect", reference)
        if code != 0:
            raise InputError(missing_image(self.program, reference, err))
        found: dict[str, Any] = json.loads(out)[0]
        identity = str(found["Id"])
        return {
            "reference": reference,
            "id": identity if identity.startswith("sha256:") else f"sha256:{identity}",
            "digests": list(found.get("RepoDigests") or []),
            "variables": list((found.get("Config") or {}).get("Env") or []),
        }

    async def prove(self, image: str, runtime: Runtime, *, timeout: float = 60.0) -> None:
        """Run something as small as can be, with one cure more as long as the engine asks for one; once in a boot.

        Raises StageError (infrastructure) with the engine's own words.
        """
        memory = cache_directory() / "engines" / f"{self._identity()}.json"
        if memory.is_file():
            remembered = msgspec.json.decode(memory.read_bytes(), type=Remembered)
            self.version = remembered.version
            for name in remembered.cures:
                self._take(next(cure for cure in CURES if cure.name == name))
            return
        code, out, err = await self.call("version", "--format", "{{.Client.Version}}")
        if code != 0:
            raise failed("engine", f"`{self.program} version` failed: {err[-500:]}")
        self.version = out.strip()
        words = ["--rm", "--network", "none", "--pull", "never", "--volume", f"{runtime.path}:{INIT_HOME}:ro"]
        words += ["--entrypoint", f"{INIT_HOME}/ld", image, "--version"]
        while True:
            code, _, err = await self.run(*words, timeout=timeout)
            if code == 0:
                break
            cure = next((cure for cure in CURES if cure.symptom in err.lower() and cure.name not in self.cures), None)
            if cure is None:
                raise failed("engine", f"{self.program} cannot run a container here: {err[-800:]}")
            self._take(cure)
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(Remembered(self.version, self.cures)))
        temporary.replace(memory)

    def _take(self, cure: Cure) -> None:
        self.cures.append(cure.name)
        self._before += cure.before
        self._after += [
            word.format(files=_limit("nofile", _MOST_FILES), processes=_limit("nproc", _MOST_PROCESSES))
            for word in cure.after
        ]

    def _identity(self) -> str:
        """Of what was proved: this program, for this user, with these options and limits, since this boot."""
        info = os.stat(self.program)
        limits = (_limit("nofile", _MOST_FILES), _limit("nproc", _MOST_PROCESSES))
        parts = (self.program, info.st_size, info.st_mtime_ns, os.geteuid(), boot_id(), limits, self._before)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    async def remove(self, name: str) -> None:
        """Kill and remove a container, which may not exist. Raises StoreError when the engine cannot."""
        podman = ["--time", "0", "--ignore"] if self.podman else []  # docker says neither, and does both
        err = ""
        for pause in (*_REMOVAL_PAUSES, None):
            code, _, err = await self.call("rm", "--force", "--volumes", *podman, name)
            if code == 0:
                return
            if pause is not None:  # seen when the container was just ending by itself
                await asyncio.sleep(pause)
        raise StoreError(f"container {name} cannot be removed: {err[-500:]}")

    def writable(self, path: str, *, megabytes: int | None, mode: str, uid: int, keep: bool) -> list[str]:
        """Words for a tmpfs of the agent's own. `keep`: with the image's files in it (podman only)."""
        size = "" if megabytes is None else f"{megabytes}m"
        if self.podman:
            fields = [f"type=tmpfs,destination={path}", f"tmpfs-mode={mode}", "U=true"]
            fields += [f"tmpfs-size={size}"] if size else []
            return ["--mount", ",".join([*fields, "tmpcopyup" if keep else "notmpcopyup"])]
        fields = ["rw,exec,nosuid,nodev", f"mode={mode}", f"uid={uid},gid={uid}", *([f"size={size}"] if size else [])]
        return ["--tmpfs", f"{path}:{','.join(fields)}"]


def find_engine(options: ContainerOptions) -> Engine:
    """The engine of the options, else the first of `ENGINES` on PATH. InputError naming the way to get one."""
    wanted = [options.engine] if options.engine else list(ENGINES)
    for name in wanted:
        program = shutil.which(name)
        if program is not None:
            return Engine(program, options)
    raise InputError(
        f"no container engine: {' and '.join(wanted)} not found on PATH; on Debian or Ubuntu "
        "`apt-get install podman runc`, or name one in sandbox.container.engine"
    )


@contextlib.contextmanager
def _memory() -> Generator[int]:
    """A file in memory, as a descriptor."""
    fd = os.memfd_create("openforgerl-engine")
    try:
        yield fd
    finally:
        os.close(fd)


def _text(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def missing_image(program: str, reference: str, said: str) -> str:
    """What to say of an image that the engine does not have."""
    return (
        f"image {reference!r} is not in the store of {program}: build it with `openforgerl images build`, "
        f"or get it with `{program} pull {reference}` ({said.strip()[-200:]})"
    )


def failed(kind: str, message: str) -> StageError:
    """A failure of the engine, which is nobody's fault who runs in it."""
    return StageError(Stage.SANDBOX, kind, message, origin=Origin.INFRASTRUCTURE, retryable=True)


def _limit(name: str, most: int) -> str:
    """`soft:hard` that this process may hand on."""
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    return f"{value}:{value}"


def names_of(lines: str) -> Sequence[str]:
    """Non-empty lines of an engine's answer."""
    return [line.strip() for line in lines.splitlines() if line.strip()]


def rootless() -> bool:
    """Whether the engine runs as an ordinary user, so that ids inside are mapped to ids of ours."""
    return os.geteuid() != 0
