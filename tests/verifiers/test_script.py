"""The script verifier: what it puts into a sandbox, in which order, and what it makes of the result."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import StageError, TaskError, boundary
from openforgerl.testing.fake_sandbox import FakeSandbox, FakeSandboxes, Program
from openforgerl.types import Exit, Origin, SandboxSpec, Stage, Task, Trajectory, Verdict
from openforgerl.verifiers.script import ScriptVerifier

NOTHING = Trajectory(attempt_id="a", calls=(), branches=())
Script = Callable[[FakeSandbox], Exit]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    tests = tmp_path / "task" / "tests"
    (tests / "data").mkdir(parents=True)
    (tests / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (tests / "test.sh").chmod(0o755)
    (tests / "data" / "expected.txt").write_text("42\n")
    return Task(
        name="sample",
        digest="d",
        path=str(tmp_path / "task"),
        instruction="Do it.",
        verifier_timeout=0.3,
        verifier_env={"MODE": "strict"},
    )


def playing(script: Script) -> FakeSandboxes:
    """A backend whose `test.sh` is `script`, and whose preparation clears /logs/verifier as the real one does."""

    async def behave(sandbox: FakeSandbox, program: Program) -> Exit:
        if program.argv[0] == "/bin/sh":
            for path in [path for path in sandbox.files if path.startswith(("/logs/verifier/", "/tests/"))]:
                del sandbox.files[path]
            return Exit(code=0)
        return script(sandbox)

    return FakeSandboxes(behave)


def writing(**files: bytes) -> Script:
    def script(sandbox: FakeSandbox) -> Exit:
        for name, data in files.items():
            sandbox.files[f"/logs/verifier/reward.{name}"] = data
        return Exit(code=0, stdout=b"checked\n")

    return script


async def verify(backend: FakeSandboxes, task: Task, before: dict[str, bytes] | None = None) -> Verdict:
    spec = SandboxSpec(run_id="r", scratch=ScriptVerifier.scratch, env={"FROM_SPEC": "1"})
    async with backend.create(spec, "a-verify") as sandbox:
        sandbox.files.update(before or {})
        with boundary(Stage.VERIFY):
            return await ScriptVerifier().verify(task, sandbox, NOTHING)


async def failing(backend: FakeSandboxes, task: Task) -> StageError:
    with pytest.raises(StageError) as raised:
        await verify(backend, task)
    assert (raised.value.stage, raised.value.origin) == (Stage.VERIFY, Origin.VERIFIER)
    return raised.value


async def test_a_passing_task(task: Task) -> None:
    seen: list[FakeSandbox] = []

    def script(sandbox: FakeSandbox) -> Exit:
        seen.append(sandbox)
        return writing(txt=b"1\n")(sandbox)

    verdict = await verify(playing(script), task)
    assert (verdict.reward, verdict.passed, verdict.reward_range) == (1.0, True, (0.0, 1.0))
    (sandbox,) = seen
    assert sandbox.files["/tests/data/expected.txt"] == b"42\n"
    assert (sandbox.modes["/tests/test.sh"], sandbox.modes["/tests/data/expected.txt"]) == (0o555, 0o444)
    prepare, test = sandbox.programs
    assert prepare.argv[:2] == ("/bin/sh", "-c")
    assert prepare.argv[3:] == ("prepare", "/tests/data")
    assert test.argv == ("/bin/bash", "/tests/test.sh")
    assert test.env == {
        "FROM_SPEC": "1",  # the fake merges the spec's own
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp/verifier-home",
        "LANG": "C.UTF-8",
        "MODE": "strict",
    }
    assert test.timeout == 0.3
    assert verdict.evidence["output"] == "checked"
    assert verdict.evidence["reward_file"] == "reward.txt"
    assert verdict.evidence["reward_sha256"] == hashlib.sha256(b"1\n").hexdigest()
    assert verdict.evidence["task_digest"] == "d"


async def test_the_exit_status_does_not_count(task: Task) -> None:
    def script(sandbox: FakeSandbox) -> Exit:
        writing(txt=b"1")(sandbox)
        return Exit(code=17)

    verdict = await verify(playing(script), task)
    assert (verdict.reward, verdict.evidence["exit"]) == (1.0, "17")


async def test_a_failing_task_is_a_verdict(task: Task) -> None:
    verdict = await verify(playing(writing(txt=b"0")), task)
    assert (verdict.reward, verdict.passed) == (0.0, False)


async def test_json_comes_before_text(task: Task) -> None:
    verdict = await verify(playing(writing(json=b'{"reward": 0.5, "n": 3}', txt=b"1")), task)
    assert (verdict.reward, verdict.metrics, verdict.evidence["reward_file"]) == (0.5, {"n": 3.0}, "reward.json")


async def test_a_broken_json_is_not_mended_by_the_text(task: Task) -> None:
    error = await failing(playing(writing(json=b"{", txt=b"1")), task)
    assert (error.kind, error.retryable) == ("reward_not_json", False)
    assert error.evidence["output"] == "checked"


async def test_planted_rewards_are_gone_before_the_script_runs(task: Task) -> None:
    planted = {"/logs/verifier/reward.txt": b"1", "/logs/verifier/reward.json": b"1", "/tests/conftest.py": b"evil"}
    backend = playing(lambda sandbox: Exit(code=1, stderr=b"boom"))
    with pytest.raises(StageError) as raised:
        await verify(backend, task, planted)
    assert raised.value.kind == "reward_absent"
    assert raised.value.evidence["output"] == "boom"
    # The guard is what removes them: without clearing, the planted file would be taken.
    lazy = FakeSandboxes()
    assert (await verify(lazy, task, planted)).reward == 1.0


async def test_a_hang_is_a_failure_that_is_not_retried(task: Task) -> None:
    async def hang(sandbox: FakeSandbox, program: Program) -> Exit:
        sandbox.files["/logs/verifier/reward.txt"] = b"1"
        if program.argv[0] == "/bin/bash":
            await asyncio.sleep(60)
        return Exit(code=0)

    error = await failing(FakeSandboxes(hang), task)
    assert (error.kind, error.retryable) == ("timeout", False)


@pytest.mark.parametrize(
    ("exit", "kind"),
    [
        (Exit(code=None, signal=9), "killed"),
        (Exit(code=None, signal=9, oom=True), "killed"),
        (Exit(code=0, oom=True), "oom"),
    ],
)
async def test_a_killed_script_is_a_failure_whatever_it_wrote(task: Task, exit: Exit, kind: str) -> None:
    def script(sandbox: FakeSandbox) -> Exit:
        writing(txt=b"1")(sandbox)
        return exit

    error = await failing(playing(script), task)
    assert (error.kind, error.retryable) == (kind, True)


async def test_a_reward_file_that_is_too_large(task: Task) -> None:
    error = await failing(playing(writing(txt=b"1" + b" " * 2**20)), task)
    assert error.kind == "reward_unreadable"


async def test_a_sandbox_that_breaks_is_a_failure_of_verification(task: Task) -> None:
    for verb in ("exec", "write", "read"):
        backend = playing(writing(txt=b"1"))
        backend.plant(verb, ConnectionResetError("gone"))
        error = await failing(backend, task)
        assert error.kind in ("io", "reward_unreadable")


async def test_a_preparation_that_fails_stops_the_grading(task: Task) -> None:
    async def broken(sandbox: FakeSandbox, program: Program) -> Exit:
        return Exit(code=1, stderr=b"rm: cannot remove")

    error = await failing(FakeSandboxes(broken), task)
    assert error.kind == "prepare"
    assert "rm: cannot remove" in error.message


async def test_a_link_among_the_tests_is_refused(task: Task) -> None:
    (Path(task.path) / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="symbolic link"):
        async with playing(writing(txt=b"1")).create(SandboxSpec(run_id="r"), "a") as sandbox:
            await ScriptVerifier().verify(task, sandbox, NOTHING)


async def test_partial_credit_passes_from_the_tasks_threshold(task: Task) -> None:
    lenient = msgspec.structs.replace(task, pass_threshold=0.5)
    assert (await verify(playing(writing(txt=b"0.5")), lenient)).passed is True
    assert (await verify(playing(writing(txt=b"0.49")), lenient)).passed is False


def shell(root: Path) -> Callable[[FakeSandbox, Program], Awaitable[Exit]]:
    """Runs programs for real, with the sandbox's absolute directories moved under `root`."""

    def moved(text: str) -> str:
        for name in ("/logs", "/tests", "/tmp/verifier-home"):
            text = text.replace(name, f"{root}{name}")
        return text

    async def run(sandbox: FakeSandbox, program: Program) -> Exit:
        for path, data in sandbox.files.items():
            if path.startswith("/tests/"):
                target = root / path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(moved(data.decode()))
        process = await asyncio.create_subprocess_exec(
            *(moved(word) for word in program.argv),
            env={name: moved(value) for name, value in program.env.items()},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await process.communicate()
        sandbox.files = {path: data for path, data in sandbox.files.items() if not path.startswith("/logs/")}
        for path in (root / "logs").rglob("*"):
            if path.is_file() and not path.is_symlink():
                sandbox.files[f"/{path.relative_to(root)}"] = path.read_bytes()
        return Exit(code=process.returncode, stdout=stdout, stderr=stderr)

    return run


async def test_the_shell_lines_do_what_they_say(task: Task, tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    (root / "logs" / "verifier").mkdir(parents=True)
    (root / "logs" / "verifier" / "reward.json").write_text("1")
    (root / "tests" / ".hidden").mkdir(parents=True)
    (root / "tmp" / "verifier-home").mkdir(parents=True)
    (root / "tmp" / "verifier-home" / ".bashrc").write_text("exit 1")
    (Path(task.path) / "tests" / "test.sh").write_text('echo 0.5 > /logs/verifier/reward.txt\nls -A "$HOME" /tests\n')
    verdict = await verify(FakeSandboxes(shell(root)), task)
    assert verdict.reward == 0.5
    assert verdict.evidence["reward_file"] == "reward.txt"
    assert ".bashrc" not in verdict.evidence["output"]
    assert ".hidden" not in verdict.evidence["output"]
    shutil.rmtree(root)
