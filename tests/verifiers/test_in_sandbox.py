"""The script verifier in the real process sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from openforgerl.errors import StageError
from openforgerl.protocols import Sandbox
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.process import ProcessSandboxes
from openforgerl.types import Origin, SandboxSpec, Stage, Task, Trajectory, Verdict
from openforgerl.verifiers.script import ScriptVerifier

pytestmark = pytest.mark.sandbox
NOTHING = Trajectory(attempt_id="a", calls=(), branches=())
SPEC = SandboxSpec(run_id="r", scratch=ScriptVerifier.scratch, env={"TASK": "1"})
Verify = Callable[..., Awaitable[Verdict]]


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with ProcessSandboxes(SandboxOptions(), tmp_path / "state").create(SPEC, "a-verify") as sandbox:
        yield sandbox


@pytest.fixture
def verify(tmp_path: Path, sandbox: Sandbox) -> Verify:
    async def run(script: str, *, timeout: float = 30.0, **files: str) -> Verdict:
        tests = tmp_path / "task" / "tests"
        tests.mkdir(parents=True)
        (tests / "test.sh").write_text(script)
        for name, text in files.items():
            (tests / name / "deep").mkdir(parents=True)
            (tests / name / "deep" / "file").write_text(text)
        task = Task(name="t", digest="d", path=str(tmp_path / "task"), instruction="Do it.", verifier_timeout=timeout)
        return await ScriptVerifier().verify(task, sandbox, NOTHING)

    return run


async def left_by_agent(sandbox: Sandbox, script: str) -> None:
    done = await sandbox.exec(["/bin/bash", "-c", script], env={}, timeout=20)
    assert done.code == 0, done.stderr
    await sandbox.kill_agent()


async def test_a_verdict_on_the_state_as_left(sandbox: Sandbox, verify: Verify) -> None:
    await left_by_agent(sandbox, "echo 42 > answer.txt")
    verdict = await verify(
        'if [ "$(cat answer.txt)" = "$(cat /tests/want/deep/file)" ]; then echo 1; else echo 0; fi '
        "> /logs/verifier/reward.txt; echo checked; pwd; env",
        want="42\n",
    )
    assert verdict.reward == 1.0
    lines = verdict.evidence["output"].splitlines()
    assert lines[:2] == ["checked", "/workspace"]
    assert "HOME=/tmp/verifier-home" in lines
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in lines


async def test_nothing_planted_is_taken_for_a_reward(sandbox: Sandbox, verify: Verify) -> None:
    await left_by_agent(
        sandbox,
        "mkdir -p /logs/verifier /tmp/verifier-home;"
        " for name in txt json; do echo 1 > /logs/verifier/reward.$name; done;"
        " echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; cp /tests/test.sh /tmp/verifier-home/.bashrc;"
        " cp /tests/test.sh /tests/.evil; touch -d 2099-01-01 /logs/verifier/*",
    )
    with pytest.raises(StageError) as raised:
        await verify("ls -A /tests /logs/verifier $HOME; exit 0")
    assert raised.value.kind == "reward_absent"
    assert raised.value.evidence["output"].split() == ["/logs/verifier:", "/tests:", "test.sh", "/tmp/verifier-home:"]


async def test_planted_links_lead_nowhere(sandbox: Sandbox, verify: Verify) -> None:
    await left_by_agent(
        sandbox,
        "mkdir -p /tmp/mine; echo 1 > /tmp/mine/reward.txt;"
        " for path in /logs/verifier /tmp/verifier-home /tests/want; do ln -s /tmp/mine $path; done",
    )
    verdict = await verify(
        "[ -f /tmp/mine/reward.txt ] && [ ! -L /logs/verifier ] && [ ! -L $HOME ] && [ -f /tests/want/deep/file ] &&"
        " echo 0.5 > /logs/verifier/reward.txt",
        want="x",
    )
    assert verdict.reward == 0.5


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("exit 0", "reward_absent"),
        ("this is (no shell", "reward_absent"),
        (": > /logs/verifier/reward.txt", "reward_empty"),
        ("echo nan > /logs/verifier/reward.txt", "reward_not_finite"),
        ("echo 1 > /tmp/r; ln -s /tmp/r /logs/verifier/reward.txt", "reward_unreadable"),
        ("echo 1 > /logs/verifier/reward.txt; ln -s /nowhere /logs/verifier/reward.json", "reward_unreadable"),
        ("mkfifo /logs/verifier/reward.txt", "reward_unreadable"),
        ("mkdir /logs/verifier/reward.txt", "reward_unreadable"),
        ("head -c 30000000 /dev/zero > /logs/verifier/reward.txt", "reward_unreadable"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "killed"),
    ],
)
async def test_what_is_no_reward_is_a_failure(verify: Verify, script: str, kind: str) -> None:
    with pytest.raises(StageError) as raised:
        await verify(script)
    error = raised.value
    assert (error.stage, error.kind, error.origin) == (Stage.VERIFY, kind, Origin.VERIFIER)


async def test_a_hang_is_a_failure(verify: Verify) -> None:
    with pytest.raises(StageError) as raised:
        await verify("echo 1 > /logs/verifier/reward.txt; trap '' TERM; sleep 60", timeout=0.5)
    assert (raised.value.kind, raised.value.retryable) == ("timeout", False)


async def test_tests_cannot_be_changed_by_what_they_run(verify: Verify) -> None:
    verdict = await verify("stat -c %a /tests/test.sh > /logs/verifier/mode; echo 1 > /logs/verifier/reward.txt")
    assert verdict.reward == 1.0
