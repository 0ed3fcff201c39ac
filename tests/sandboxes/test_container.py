"""The container backend after crashes and cancelled starts, and what the engine says of what is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.cgroups import Group, detect, limits_of
from openforgerl.sandboxes.container import ContainerSandboxes
from openforgerl.sandboxes.container_engine import find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.refs import members
from openforgerl.types import Layer, SandboxLimits, SandboxSpec, Stage

pytestmark = pytest.mark.container
RUN = f"container-{os.getpid()}"


@pytest.fixture
def backend(tmp_path: Path) -> ContainerSandboxes:
    return ContainerSandboxes(SandboxOptions(), tmp_path)


async def containers(*filters: str) -> list[str]:
    """Names of this file's containers; `status=running` and the like narrow it."""
    words = [word for text in (f"label=openforgerl.run={RUN}", *filters) for word in ("--filter", text)]
    code, out, err = await find_engine(ContainerOptions()).call("ps", "--all", *words, "--format", "{{.Names}}")
    assert code == 0, err
    return out.split()


BUSY = """
import asyncio, sys
from pathlib import Path
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.container import ContainerSandboxes
from openforgerl.types import SandboxSpec

async def one(backend, number):
    while True:
        async with backend.create(SandboxSpec(run_id=sys.argv[2]), f"a{number}") as sandbox:
            await sandbox.exec(["sh", "-c", "setsid sleep 60 & true"], env={}, timeout=30)

async def main():
    backend = ContainerSandboxes(SandboxOptions(), Path(sys.argv[1]))
    async with backend.create(SandboxSpec(run_id=sys.argv[2]), "first"):
        print("ready", flush=True)
    await asyncio.gather(*(one(backend, number) for number in range(3)))

asyncio.run(main())
"""


@pytest.mark.parametrize("delay_ms", [30, 150, 400, 900])
async def test_kill_9_at_any_moment_leaves_nothing_that_runs_and_nothing_after_a_reap(backend, tmp_path, delay_ms):
    words = [sys.executable, "-c", BUSY, str(tmp_path), RUN]
    owner = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None and await owner.stdout.readline() == b"ready\n"
    await asyncio.sleep(delay_ms / 1000)
    owner.kill()
    await owner.wait()
    groups = [path for ref in await backend.list(RUN) for path in ref.detail["cgroups"]]
    for _ in range(100):  # one whose start was under way finds nobody at its socket for 30 s; the others end at once
        if len(await containers("status=running")) <= 3:
            break
        await asyncio.sleep(0.1)
    assert await backend.reap(RUN) >= 1
    for _ in range(50):  # the engine's own client may be in the middle of a creation; the next sweep has it
        if not await containers():
            break
        await asyncio.sleep(0.2)
        await backend.reap(RUN)
    assert await containers() == []
    assert await backend.list(RUN) == []
    assert not any(Path(path).exists() for path in groups)
    assert await backend.reap(RUN) == 0


async def test_a_reap_finds_what_no_record_names(backend, tmp_path):
    async with backend.create(SandboxSpec(run_id=RUN), "a") as sandbox:
        (record,) = tmp_path.rglob("record.json")
        record.unlink()
        assert await backend.list(RUN) == []
        assert await ContainerSandboxes(SandboxOptions(), tmp_path).reap(RUN) == 1
        assert members(sandbox.report["namespaces"]["pid"]) == []


async def test_a_creation_that_is_cancelled_leaves_nothing(backend, tmp_path):
    async def live() -> None:
        async with backend.create(SandboxSpec(run_id=RUN), "a") as sandbox:
            await sandbox.exec(["sleep", "30"], env={}, timeout=60)

    for delay_ms in (1, 60, 150, 300, 800):
        task = asyncio.create_task(live())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await containers() == []
        assert list(tmp_path.rglob("record.json")) == []


async def test_an_image_that_cannot_start_says_so(tmp_path):
    """An engine that fails only when the real container starts: here, a mount that is not there any more."""
    backend = ContainerSandboxes(SandboxOptions(), tmp_path / "state")
    layer = tmp_path / "with:colon"
    layer.mkdir()
    spec = SandboxSpec(run_id=RUN, layers=(Layer(source=str(layer), target="/opt/x"),))
    with pytest.raises(InputError, match="a colon cannot stand in a mounted path"):
        async with backend.create(spec, "a"):
            pass
    limits = SandboxLimits(disk_mb=1 << 60)  # more than a tmpfs can be told
    with pytest.raises(StageError, match="could not start a container") as caught:
        async with backend.create(SandboxSpec(run_id=RUN, limits=limits), "a"):
            pass
    assert (caught.value.stage, caught.value.kind) == (Stage.SANDBOX, "start")
    assert await containers() == [] and list(tmp_path.rglob("record.json")) == []


async def test_a_state_folder_may_be_relative(tmp_path, monkeypatch):
    """Run folders are, by default; an engine takes a relative source for the name of a volume."""
    monkeypatch.chdir(tmp_path)
    backend = ContainerSandboxes(SandboxOptions(), Path("state"))
    monkeypatch.chdir("/")  # and it is the folder that it was when the backend was made
    async with backend.create(SandboxSpec(run_id=RUN), "a") as sandbox:
        assert (await sandbox.exec(["true"], env={}, timeout=30)).code == 0
    assert (tmp_path / "state").is_dir() and await containers() == []


async def test_the_report_is_whole_and_true(backend):
    limits = SandboxLimits(memory_mb=300, processes=70, disk_mb=16, open_files=512)
    async with backend.create(SandboxSpec(run_id=RUN, limits=limits), "a") as sandbox:
        report = json.loads(json.dumps(dict(sandbox.report)))
        end = await sandbox.exec(["cat", "/proc/self/cgroup"], env={}, timeout=10)
        code, out, _ = await find_engine(ContainerOptions()).call("inspect", sandbox.ref.detail["name"])
        inspected = json.loads(out)[0]
    assert code == 0 and report["image"]["id"].removeprefix("sha256:") == inspected["Image"].removeprefix("sha256:")
    assert report["engine"].startswith(("podman ", "docker "))
    assert report["uid"] == {"inside": 1000, "host": 1000}
    assert report["system_call_filter"] and report["engine_filter"] and report["no_new_privileges"]
    version = detect().version if detect() is not None else 0
    assert report["limits"] == {
        "memory": f"cgroup v{version} 300 MB, tmpfs included",
        "processes": f"cgroup v{version} 70",
        "disk": "tmpfs 16 MB each",
        "open_files": "RLIMIT_NOFILE 512",
        "cpu": "none",
    }
    assert sandbox.ref.detail["token"].encode() in end.stdout  # the agent's group is the one that we made


async def test_limits_are_read_back_from_the_kernel():
    group = Group(detect(), f"openforgerl-test-{os.getpid()}")
    sleeper = await asyncio.create_subprocess_exec("sleep", "30")
    try:
        group.make(SandboxLimits(memory_mb=123, processes=45))
        group.add(sleeper.pid)
        found = limits_of(sleeper.pid)
        assert (found.memory, found.processes, found.oom_kills()) == (123 << 20, 45, 0)
    finally:
        sleeper.kill()
        await sleeper.wait()
        for path in group.directories:
            path.rmdir()
    assert limits_of(sleeper.pid).memory is None
