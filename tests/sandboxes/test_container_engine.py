"""What an engine needs on this machine is found by asking it; played by a script that answers as podman did."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openforgerl.errors import InputError, StageError, StoreError
from openforgerl.sandboxes.container_engine import Engine, find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.container_probe import probe_containers
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check
from openforgerl.sandboxes.runtime import Runtime
from openforgerl.types import Origin, Stage

RUNTIME = Runtime(path=Path("/nowhere"), digest="sha256:0")
RLIMIT = "Error: runc: error setting rlimits for ready process: error setting rlimit type 7: operation not permitted"
HYBRID = "Error: crun: cgroups in hybrid mode not supported, drop all controllers from cgroupv2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENFORGERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def engine(folder: Path, script: str) -> Engine:
    """An engine `podman` that writes down its words and does what `script` says."""
    program = folder / "podman"
    program.write_text(f'#!/bin/sh\necho "$*" >> {folder}/said\n[ "$1" = version ] && echo 4.3.1 && exit 0\n{script}\n')
    program.chmod(0o755)
    return find_engine(ContainerOptions(engine=str(program)))


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


async def test_one_that_runs_needs_nothing(tmp_path: Path) -> None:
    one = engine(tmp_path, "exit 0")
    await one.prove("image", RUNTIME)
    assert (one.version, one.cures) == ("4.3.1", [])
    assert [line.split()[0] for line in said(tmp_path)] == ["version", "run"]


async def test_each_symptom_has_its_cure_and_both_may_come(tmp_path: Path) -> None:
    script = f'case "$*" in *"--runtime runc run"*) ;; *) echo "{HYBRID}" >&2; exit 126;; esac\n'
    script += f'case "$*" in *nofile=*:*nproc=*) exit 0;; *) echo "{RLIMIT}" >&2; exit 126;; esac'
    one = engine(tmp_path, script)
    await one.prove("image", RUNTIME)
    assert one.cures == ["runtime runc", "ulimits of our own"]
    assert len(said(tmp_path)) == 4
    await one.run("--detach", "image", timeout=10)
    assert said(tmp_path)[-1].startswith("--runtime runc run --ulimit nofile=")


async def test_it_is_asked_once_in_a_boot(tmp_path: Path) -> None:
    script = f'case "$*" in *nofile=*) exit 0;; *) echo "{RLIMIT}" >&2; exit 126;; esac'
    await engine(tmp_path, script).prove("image", RUNTIME)
    asked = len(said(tmp_path))
    again = find_engine(ContainerOptions(engine=str(tmp_path / "podman")))
    await again.prove("image", RUNTIME)
    assert (again.version, again.cures, len(said(tmp_path))) == ("4.3.1", ["ulimits of our own"], asked)
    await again.run("image", timeout=10)
    assert "--ulimit nofile=" in said(tmp_path)[-1]


async def test_a_cure_that_does_not_help_is_tried_once(tmp_path: Path) -> None:
    one = engine(tmp_path, f'echo "{RLIMIT}" >&2; exit 126')
    with pytest.raises(StageError, match="error setting rlimit") as caught:
        await one.prove("image", RUNTIME)
    assert (caught.value.stage, caught.value.kind, caught.value.origin) == (
        Stage.SANDBOX,
        "engine",
        Origin.INFRASTRUCTURE,
    )
    assert len(said(tmp_path)) == 3


async def test_an_unknown_error_is_said_in_its_own_words(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(StageError, match="no space left on device"):
        await engine(tmp_path, 'echo "write: no space left on device" >&2; exit 125').prove("image", RUNTIME)
    assert not (cache / "engines").exists()  # only what worked is remembered


async def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    one = engine(tmp_path, "exec sleep 60")
    with pytest.raises(StageError, match="gave no answer in 0 s"):
        await one.call("ps", timeout=0.3)
    task = asyncio.create_task(one.call("ps"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_removal_that_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be removed: it is stuck"):
        await engine(tmp_path, "echo it is stuck >&2; exit 2").remove("name")


async def test_a_removal_that_meets_an_ending_container_is_tried_again(tmp_path: Path) -> None:
    """Seen with forty at once: "container state improper: stopped"."""
    script = f'[ "$(grep -c ^rm {tmp_path}/said)" -ge 3 ] || {{ echo container state improper >&2; exit 2; }}'
    await engine(tmp_path, script).remove("name")
    assert len(said(tmp_path)) == 3


async def test_a_child_that_the_engine_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    code, out, _ = await engine(tmp_path, "sleep 5 & echo id").call("run", timeout=3)
    assert (code, out) == (0, "id\n")


def test_without_an_engine_it_says_how_to_get_one() -> None:
    with pytest.raises(InputError, match="apt-get install podman runc"):
        find_engine(ContainerOptions(engine="no-such-engine"))


@pytest.mark.parametrize("change", [{"parallel": 0}, {"cpus": 0.0}])
def test_options_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"sandbox\.container\."):
        ContainerOptions(**change)


def findings(folder: Path, script: str, *, required: bool) -> dict[str, Check]:
    options = SandboxOptions(container=ContainerOptions(engine=engine(folder, script).program))
    return {check.check: check for check in probe_containers(options, required=required)}


def test_doctor_says_what_containers_lack(tmp_path: Path) -> None:
    found = findings(tmp_path, "exit 0", required=True)
    assert found["container engine"].ok and "podman 4.3.1" in found["container engine"].detail
    found = findings(tmp_path, '[ "$1" = image ] && exit 1', required=False)
    assert found["container image"].fix == "openforgerl images build" and not found["container image"].required
    found = findings(
        tmp_path, 'touch "$0"; [ "$1" = run ] && echo "no such runtime" >&2 && exit 125; true', required=True
    )
    assert "no such runtime" in found["container engine"].fix and found["container engine"].required
    options = SandboxOptions(container=ContainerOptions(engine="no-such-engine"))
    (only,) = probe_containers(options, required=False)
    assert not only.ok and not only.required and "apt-get install podman runc" in only.fix
