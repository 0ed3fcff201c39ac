"""Harbor's verifier: the task's `tests/test.sh`, run on the state an agent left, says the reward in a file."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import stat
from pathlib import Path
from typing import ClassVar

from openforgerl.errors import InputError, StageError, TaskError
from openforgerl.protocols import Sandbox
from openforgerl.types import Exit, Origin, Stage, Task, Trajectory, Verdict
from openforgerl.verifiers.reward import Reward, invalid, parse_json, parse_text

LOGS = "/logs/verifier"
TESTS = "/tests"
HOME = "/tmp/verifier-home"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_REWARD_BYTES = 2**20

_PREPARE_TIMEOUT = 60.0
_PREPARE = f"""\
rm -rf {LOGS} {HOME} {TESTS}/* {TESTS}/.[!.]* {TESTS}/..?* &&
mkdir -p {LOGS} /logs/agent /logs/artifacts {HOME} "$@"
"""


class ScriptVerifier:
    """Grades in the sandbox it is given, which must be free of the agent's processes.

    The sandbox's spec must name `scratch` as writable directories.
    """

    scratch: ClassVar[tuple[str, ...]] = ("/logs", "/tests")
    """What `SandboxSpec.scratch` of the grading sandbox must hold."""

    async def verify(self, task: Task, sandbox: Sandbox, trajectory: Trajectory) -> Verdict:
        """Upload `tests/`, run `test.sh`, read `reward.json` before `reward.txt`.

        As in Harbor the script's exit status does not count. A script that hangs, is killed, or leaves no
        readable reward raises `StageError` (VERIFY, origin verifier): it never becomes a reward. `trajectory`
        is not looked at.
        """
        del trajectory
        digest = await self._upload(task, sandbox)
        exit = await sandbox.exec(
            ["/bin/bash", f"{TESTS}/test.sh"],
            env={**_environment(), **task.verifier_env},
            timeout=task.verifier_timeout,
        )
        evidence = {
            "output": _tail(exit),
            "exit": str(exit.code if exit.signal is None else f"signal {exit.signal}"),
            "tests_sha256": digest,
            "task_digest": task.digest,
        }
        _check_exit(task, exit, evidence)
        try:
            name, data, reward = await self._reward(task, sandbox)
        except StageError as error:
            error.evidence.update(evidence)
            raise
        return Verdict(
            reward=reward.value,
            passed=reward.value >= task.pass_threshold,
            reward_range=task.reward_range,
            metrics=reward.metrics,
            evidence={**evidence, "reward_file": name, "reward_sha256": hashlib.sha256(data).hexdigest()},
        )

    async def _upload(self, task: Task, sandbox: Sandbox) -> str:
        files = await asyncio.to_thread(_tests_of, task)
        folders = sorted({posixpath.dirname(path) for path in files} - {TESTS})
        done = await sandbox.exec(
            ["/bin/sh", "-c", _PREPARE, "prepare", *folders], env=_environment(), timeout=_PREPARE_TIMEOUT
        )
        if done.code != 0:
            raise _failed(
                "prepare", f"the sandbox could not be prepared for grading: {_tail(done)}", {"exit": str(done.code)}
            )
        total = hashlib.sha256()
        for path, (data, mode) in sorted(files.items()):
            await sandbox.write(path, data, mode=mode)
            total.update(f"{hashlib.sha256(data).hexdigest()}  {path}\n".encode())
        return total.hexdigest()

    async def _reward(self, task: Task, sandbox: Sandbox) -> tuple[str, bytes, Reward]:
        for name, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
            data = await _read(sandbox, f"{LOGS}/{name}")
            if data is not None:
                return name, data, parse(data, task.reward_range)
        raise invalid("absent", f"tests/test.sh wrote neither {LOGS}/reward.json nor {LOGS}/reward.txt")


def _environment() -> dict[str, str]:
    return {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8"}


def _tests_of(task: Task) -> dict[str, tuple[bytes, int]]:
    """Path inside → bytes and mode; nothing is writable, even for the verifier itself."""
    root = Path(task.path) / "tests"
    if not (root / "test.sh").is_file():
        raise TaskError(f"task {task.name}: {root / 'test.sh'} is missing")
    files: dict[str, tuple[bytes, int]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise TaskError(f"task {task.name}: {path} is a symbolic link; put the file itself into the task")
        if path.is_file():
            mode = 0o555 if path.stat().st_mode & stat.S_IXUSR else 0o444
            files[f"{TESTS}/{path.relative_to(root).as_posix()}"] = (path.read_bytes(), mode)
    return files


def _check_exit(task: Task, exit: Exit, evidence: dict[str, str]) -> None:
    if exit.timed_out:
        # The same script on the same state hangs again: not worth another attempt (Harbor's table).
        message = f"tests/test.sh did not end within {task.verifier_timeout:g} s"
        raise _failed("timeout", message, evidence, retryable=False)
    if exit.signal is not None or exit.code is None:
        why = "by the memory limit" if exit.oom else "from outside"
        raise _failed("killed", f"tests/test.sh was killed {why} (signal {exit.signal})", evidence)
    if exit.oom:
        raise _failed("oom", "the memory limit killed a process of tests/test.sh", evidence)


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path, limit=MAX_REWARD_BYTES)
    except FileNotFoundError:
        return None
    except (InputError, OSError) as error:
        raise invalid("unreadable", f"{path} is no plain file of at most {MAX_REWARD_BYTES} bytes: {error}") from error


def _failed(kind: str, message: str, evidence: dict[str, str], *, retryable: bool = True) -> StageError:
    return StageError(Stage.VERIFY, kind, message, origin=Origin.VERIFIER, retryable=retryable, evidence=dict(evidence))


def _tail(exit: Exit, limit: int = 1000) -> str:
    text = (exit.stdout[-limit:] + exit.stderr[-limit:]).decode(errors="replace").strip()
    return text or "(no output)"
