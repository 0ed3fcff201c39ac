"""What a sandbox that shares the host's system needs from a task's environment."""

from __future__ import annotations

import glob
import posixpath
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from openforgerl.errors import TaskError
from openforgerl.tasks.content import files_of
from openforgerl.tasks.dockerfile import Instruction, environment, fill, parse, words
from openforgerl.types import Task

_NO_EFFECT = {"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD", "ENTRYPOINT", "SHELL", "USER"}
"""Say nothing about the files an agent finds; the sandbox decides user and program itself."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class EnvironmentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A task environment without its image."""

    files: dict[str, str] = {}
    """Absolute path inside → host file, for `SandboxSpec.files`."""
    workdir: str
    env: dict[str, str] = {}
    base: str
    """The image named by FROM. It is not pulled: the host's own system takes its place."""
    notes: tuple[str, ...] = ()
    """What was left out, for the record."""


def plan_environment(task: Task) -> EnvironmentPlan:
    """Files, working directory and variables of a task for the process backend.

    Supports FROM, WORKDIR, COPY from the build context, ENV and what has no effect on files. Raises
    `TaskError` ("needs a container backend") for everything else.
    """
    if task.environment.dockerfile is None:
        raise TaskError(
            f"task {task.name}: environment.docker_image = {task.environment.image!r} needs a container backend"
        )
    reader = _Reader(task.name, Path(task.path) / "environment")
    if (reader.context / ".dockerignore").exists():
        raise TaskError(f"task {task.name}: environment/.dockerignore needs a container backend")
    for instruction in parse(task.environment.dockerfile):
        reader.read(instruction)
    if reader.base is None:
        raise TaskError(f"task {task.name}: the Dockerfile has no FROM")
    return EnvironmentPlan(
        files=reader.files,
        workdir=task.environment.workdir,
        env={**reader.env, **task.environment.env},
        base=reader.base,
        notes=(f"FROM {reader.base}: the host's system is used instead", *reader.notes),
    )


def needs_image(task: Task) -> bool:
    """Whether a task's environment is more than files and variables on top of some system."""
    try:
        plan_environment(task)
    except TaskError:
        return True
    return False


class _Reader:
    def __init__(self, task: str, context: Path) -> None:
        self.context = context
        self.base: str | None = None
        self.files: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.notes: list[str] = []
        self._task = task
        self._workdir = "/"
        self._directories = {"/"}

    def read(self, instruction: Instruction) -> None:
        """Take one instruction in."""
        if instruction.name == "FROM":
            self._from(instruction)
        elif instruction.name == "WORKDIR":
            path = posixpath.join(self._workdir, fill(instruction, instruction.rest, self.env))
            self._workdir = posixpath.normpath(path)
            self._directories.add(self._workdir)
        elif instruction.name == "ENV":
            # PATH comes from the base image in Docker; the sandbox sets this one.
            self.env.update(environment(instruction, {"PATH": _PATH, **self.env}))
        elif instruction.name == "COPY":
            self._copy(instruction)
        elif instruction.name in _NO_EFFECT:
            self.notes.append(f"{instruction.name} {instruction.rest}: no effect here")
        else:
            raise self._refused(instruction, f"{instruction.name} needs a container backend")

    def _from(self, instruction: Instruction) -> None:
        names = [word for word in instruction.rest.split() if not word.startswith("--")]
        if self.base is not None:
            raise self._refused(instruction, "a build of several stages needs a container backend")
        if not names:
            raise self._refused(instruction, "FROM names no image")
        self.base = names[0]

    def _copy(self, instruction: Instruction) -> None:
        sources, target = self._copy_arguments(instruction)
        destination = posixpath.normpath(posixpath.join(self._workdir, target))
        matches = [path for source in sources for path in self._matches(instruction, source)]
        into = target.endswith("/") or target in (".", "..") or destination in self._directories
        if len(matches) > 1 and not into:
            raise self._refused(instruction, f"several sources need a target that ends in '/'; got {target!r}")
        for path in matches:
            if path.is_dir():
                self._directories.add(destination)
                for relative in files_of(path):
                    self.files[posixpath.join(destination, relative)] = str(path / relative)
            else:
                self.files[posixpath.join(destination, path.name) if into else destination] = str(path)

    def _copy_arguments(self, instruction: Instruction) -> tuple[Sequence[str], str]:
        rest = instruction.rest
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            if not flag.startswith(("--chown", "--link")):
                raise self._refused(instruction, f"COPY {flag} needs a container backend")
            self.notes.append(f"COPY {flag}: no effect here, files belong to the agent")
            rest = rest.strip()
        if rest.startswith("<<"):
            raise self._refused(instruction, "COPY of a here-document needs a container backend")
        parts = self._json_words(instruction, rest) if rest.startswith("[") else words(instruction, rest)
        parts = [fill(instruction, part, self.env) for part in parts]
        if len(parts) < 2:
            raise self._refused(instruction, "COPY needs a source and a target")
        return parts[:-1], parts[-1]

    def _json_words(self, instruction: Instruction, text: str) -> list[str]:
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise self._refused(instruction, f"not a JSON list of strings: {error}") from error

    def _matches(self, instruction: Instruction, source: str) -> list[Path]:
        relative = PurePosixPath(source.lstrip("/"))
        if ".." in relative.parts:
            raise self._refused(instruction, f"{source!r} leaves the environment directory")
        if not glob.has_magic(source):
            path = self.context / relative
            if not path.exists():
                raise self._refused(instruction, f"environment/{relative} does not exist")
            return [path]
        found = sorted(self.context.glob(str(relative)))
        if not found:
            raise self._refused(instruction, f"{source!r} matches nothing in environment/")
        return found

    def _refused(self, instruction: Instruction, message: str) -> TaskError:
        return TaskError(f"task {self._task}: environment/Dockerfile line {instruction.line}: {message}")
