"""Images without a registry: a base of Debian packages, and a task's own Dockerfile.

An image's name holds the digest of what it is made from, so that it is built once and never mistaken for another.
What the packages' archive served on that day is the image's own id, which every attempt records.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.sandboxes.container_engine import Engine, rootless
from openforgerl.sandboxes.spec import AGENT_UID
from openforgerl.types import Task

REPOSITORY = "localhost/openforgerl"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
_TEMPORARY = 'rm -rf "$1/var/tmp" && ln -s /tmp "$1/var/tmp"'
"""The root is read-only in a sandbox, and only /tmp is writable, as in a process sandbox."""
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")


class BaseRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """What the base image is made of: what tasks, verifiers and harnesses of this project expect to find."""

    suite: str = "bookworm"
    packages: tuple[str, ...] = ("ca-certificates", "curl", "git", "procps", "python3")

    def reference(self) -> str:
        """Its name in the engine's store."""
        text = json.dumps([self.suite, *sorted(self.packages), *_LEFT_OUT, _TEMPORARY, platform.machine()])
        return f"{REPOSITORY}/base:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def base_reference() -> str:
    """The name of the base image."""
    return BaseRecipe().reference()


def task_reference(task: Task, base: str | None) -> str:
    """The name of a task's image: by its Dockerfile, its build context and what FROM is replaced with."""
    text = json.dumps([task.digest, base])
    return f"{REPOSITORY}/task:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


async def present(engine: Engine, reference: str) -> bool:
    """Whether the engine has it."""
    code, _, _ = await engine.call("image", "inspect", "--format", "{{.Id}}", reference)
    return code == 0


async def build_base(engine: Engine, recipe: BaseRecipe | None = None, *, force: bool = False) -> tuple[str, bool]:
    """Make the base image with mmdebstrap, about two minutes; (its name, whether it was made now).

    Raises InputError naming what is missing.
    """
    recipe = recipe or BaseRecipe()
    reference = recipe.reference()
    if not force and await present(engine, reference):
        return reference, False
    program = shutil.which("mmdebstrap")
    if program is None:
        raise InputError(
            "the base image is made from Debian packages by mmdebstrap, which is not installed: "
            "`apt-get install mmdebstrap`; or name an image of your own in sandbox.container.image"
        )
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise InputError(f"no base image for {platform.machine()}: name one in sandbox.container.image")
    with tempfile.TemporaryDirectory(prefix="openforgerl-image-") as folder:
        archive = Path(folder) / "base.tar"
        words = [program, "--variant=minbase", f"--mode={'unshare' if rootless() else 'root'}"]
        words += [f"--architectures={machine}", f"--include={','.join(recipe.packages)}"]
        words += [f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT]
        words += [f"--customize-hook={_TEMPORARY}"]
        words += [recipe.suite, str(archive), *_archive(recipe.suite)]
        await _tool(words, "mmdebstrap", timeout=1800)
        code, _, err = await engine.call("import", str(archive), reference, timeout=600)
    if code != 0:
        raise InputError(f"`{engine.program} import` of the base image failed: {err[-500:]}")
    return reference, True


async def build_task(engine: Engine, task: Task, base: str | None) -> tuple[str, bool]:
    """Build a task's Dockerfile; (its name, whether it was built now). `base` takes the place of its FROM, if given.

    The work directory of the result belongs to the agent. Raises InputError with the build's last words.
    """
    if task.environment.dockerfile is None:
        raise InputError(f"task {task.name}: it names an image and has no Dockerfile to build")
    reference = task_reference(task, base)
    if await present(engine, reference):
        return reference, False
    context = Path(task.path) / "environment"
    own = f"{reference}-own"
    words = ["build", "--file", str(context / "Dockerfile"), "--tag", own]
    if base is not None:
        if not engine.podman:
            raise InputError("only podman can build with another FROM (sandbox.container.replace_from)")
        words += ["--from", base, "--pull=never"]
    words += ["--isolation", "chroot"] if engine.podman else []
    await _built(engine, [*words, str(context)], f"task {task.name}")
    with tempfile.TemporaryDirectory(prefix="openforgerl-image-") as folder:
        owner, workdir = f"{AGENT_UID}:{AGENT_UID}", task.environment.workdir
        (Path(folder) / "Dockerfile").write_text(
            f"FROM {own}\nUSER 0:0\nRUN mkdir -p {workdir} && chown -R {owner} {workdir}\n"
        )
        words = ["build", "--tag", reference, *(["--pull=never", "--isolation", "chroot"] if engine.podman else [])]
        await _built(engine, [*words, folder], f"task {task.name}")
    return reference, True


async def _built(engine: Engine, words: Sequence[str], what: str) -> None:
    code, out, err = await engine.call(*words, timeout=3600)
    if code != 0:
        raise InputError(f"{what}: its image cannot be built: {(out + err)[-1500:]}")


def _archive(suite: str) -> list[str]:
    """Where this machine itself gets Debian's packages from, if it is a Debian of that suite; else the default."""
    release = platform.freedesktop_os_release()
    if release.get("ID") != "debian" or release.get("VERSION_CODENAME") != suite:
        return []
    return [next(path for path in _SOURCES if os.path.exists(path))]


async def _tool(words: Sequence[str], name: str, *, timeout: float) -> None:
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
    )
    try:
        async with asyncio.timeout(timeout):
            _, err = await process.communicate()
    except TimeoutError as error:
        raise InputError(f"{name} did not finish in {timeout:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InputError(f"{name} failed: {err.decode(errors='replace')[-800:]}")
