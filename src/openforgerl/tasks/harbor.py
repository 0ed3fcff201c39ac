"""Harbor task directories: `task.toml`, `instruction.md`, `environment/`, `solution/`, `tests/`."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from openforgerl.errors import TaskError
from openforgerl.tasks.content import digest_of
from openforgerl.tasks.dockerfile import workdir_of
from openforgerl.tasks.environment import plan_environment
from openforgerl.tasks.manifest import Manifest, read_manifest
from openforgerl.tasks.section import Finding
from openforgerl.types import Environment, Task

MAX_TEXT_BYTES = 2**20
"""Largest `task.toml`, `instruction.md` and Dockerfile."""
DEFAULT_WORKDIR = "/workspace"

_CANARY = re.compile(r"(?:<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def read_task(path: Path) -> Task:
    """One task. Raises `TaskError` naming directory, field and fix; oddities that do not matter pass (`lint`)."""
    task, findings = _read(path)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise TaskError(f"task {path}: " + "; ".join(f"{error.where}: {error.message}" for error in errors))
    assert task is not None  # no task without an error
    return task


def read_tasks(path: Path) -> list[Task]:
    """All tasks in `path`, sorted by name: it is a task directory, or holds some at any depth.

    Raises `TaskError` when there is none, when one cannot be read, and when two have the same name.
    """
    if not path.is_dir():
        raise TaskError(f"{path} is not a directory; give a task directory or a directory of tasks")
    by_name: dict[str, Task] = {}
    for directory in task_directories(path):
        task = read_task(directory)
        other = by_name.setdefault(task.name, task)
        if other is not task:
            raise TaskError(f"tasks {other.path} and {task.path} are both named {task.name!r}; rename one")
    if not by_name:
        raise TaskError(f"{path} holds no task: no directory with a task.toml in it")
    return [by_name[name] for name in sorted(by_name)]


def task_directories(path: Path) -> list[Path]:
    """Every directory with a `task.toml` at or below `path`, sorted; tasks do not nest."""
    found: list[Path] = []
    for directory, subdirectories, files in os.walk(path):
        if "task.toml" in files:
            found.append(Path(directory))
            subdirectories.clear()
        elif "instruction.md" in files:
            raise TaskError(f"{directory} has an instruction.md but no task.toml; add one or remove it")
    return sorted(found)


def lint(path: Path) -> list[Finding]:
    """Everything odd about a task, errors first. Empty = nothing to say."""
    task, findings = _read(path)
    if task is not None:
        try:
            plan_environment(task)
        except TaskError as error:
            message = f"the process backend cannot run this: {error}"
            findings.append(Finding(level="warning", where="environment", message=message))
    return sorted(findings, key=lambda finding: finding.level != "error")


def strip_canary(text: str) -> str:
    """Without the leading comment lines that hold the word canary, and the blank lines after them.

    Benchmarks mark their files with such lines so that training data can be searched for them; the agent
    must not see them.
    """
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    if start == 0:
        return text
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def _read(path: Path) -> tuple[Task | None, list[Finding]]:
    try:
        return _read_or_raise(path)
    except TaskError as error:
        return None, [Finding(level="error", where=path.name, message=str(error))]


def _read_or_raise(path: Path) -> tuple[Task | None, list[Finding]]:
    if not path.is_dir():
        raise TaskError(f"{path} is not a directory")
    path = path.resolve()
    digest = digest_of(path)
    try:
        table = tomllib.loads(_text(path / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path / 'task.toml'} is not TOML: {error}") from error
    manifest, findings = read_manifest(table)
    findings += _layout(path, manifest)
    # The trailing newline of the file is not part of what a person would type.
    instruction = strip_canary(_text(path / "instruction.md")).rstrip("\r\n")
    if not instruction.strip():
        findings.append(Finding(level="error", where="instruction.md", message="is empty; say what is to be done"))
    dockerfile = path / "environment" / "Dockerfile"
    recipe = _text(dockerfile) if dockerfile.is_file() else None
    if any(finding.level == "error" for finding in findings):
        return None, findings
    return _task(path, digest, instruction, manifest, recipe), findings


def _task(path: Path, digest: str, instruction: str, manifest: Manifest, dockerfile: str | None) -> Task:
    defaults = {
        name: value
        for name, value in (("agent_timeout", manifest.agent_timeout), ("verifier_timeout", manifest.verifier_timeout))
        if value is not None
    }
    threshold = manifest.pass_threshold
    return Task(
        name=manifest.name or path.name,
        digest=digest,
        path=str(path),
        instruction=instruction,
        environment=Environment(
            workdir=manifest.workdir or (workdir_of(dockerfile) if dockerfile else None) or DEFAULT_WORKDIR,
            image=manifest.image,
            dockerfile=dockerfile,
            cpus=manifest.cpus,
            memory_mb=manifest.memory_mb,
            storage_mb=manifest.storage_mb,
            env=manifest.env,
        ),
        verifier_env=manifest.verifier_env,
        artifacts=manifest.artifacts,
        reward_range=manifest.reward_range,
        pass_threshold=manifest.reward_range[1] if threshold is None else threshold,
        metadata=manifest.metadata,
        **defaults,
    )


def _layout(path: Path, manifest: Manifest) -> list[Finding]:
    findings: list[Finding] = []

    def say(level: str, where: str, message: str) -> None:
        findings.append(Finding(level="error" if level == "error" else "warning", where=where, message=message))

    if not (path / "tests" / "test.sh").is_file():
        say("error", "tests/test.sh", "is missing; it must write a number to /logs/verifier/reward.txt")
    if not (path / "solution" / "solve.sh").is_file():
        say("warning", "solution/solve.sh", "is missing: nobody can check that the task can be solved")
    compose = [name for name in _COMPOSE if (path / "environment" / name).is_file()]
    if compose:
        say("error", f"environment/{compose[0]}", "needs a backend for several containers, which there is none yet")
    elif manifest.image is None and not (path / "environment" / "Dockerfile").is_file():
        say("error", "environment/Dockerfile", "is missing; write one or set environment.docker_image")
    return findings


def _text(path: Path) -> str:
    if not path.is_file():
        raise TaskError(f"{path} is missing")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise TaskError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TEXT_BYTES} are accepted")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 (byte {error.start})") from error
