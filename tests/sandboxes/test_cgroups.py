"""Control groups: both versions against a folder that looks like one, and the real ones of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from openforgerl.errors import StoreError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.refs import ProcessRef, load_all
from openforgerl.types import SandboxLimits

LIMITS = SandboxLimits(memory_mb=3, processes=5)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_version_2_has_one_folder(tmp_path):
    group = cgroups.Group(cgroups.Hierarchy(version=2, memory=tmp_path, processes=tmp_path), "one")
    assert group.directories == [tmp_path / "one"]
    (tmp_path / "one").mkdir()
    (tmp_path / "one/memory.swap.max").touch()  # there where the kernel has swap accounting
    group.make(LIMITS)
    group.add(77)
    expected = {"memory.max": "3145728", "memory.swap.max": "0", "pids.max": "5", "cgroup.procs": "77"}
    assert content(tmp_path / "one") == expected
    (tmp_path / "one/memory.events").write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n")
    assert group.oom_kills() == 2


def test_version_1_has_one_for_each_controller(tmp_path):
    group = cgroups.Group(cgroups.Hierarchy(version=1, memory=tmp_path / "m", processes=tmp_path / "p"), "one")
    (tmp_path / "m/one").mkdir(parents=True)
    (tmp_path / "p/one").mkdir(parents=True)
    group.make(LIMITS)
    group.add(77)
    assert content(tmp_path / "m/one") == {"memory.limit_in_bytes": "3145728", "cgroup.procs": "77"}
    assert content(tmp_path / "p/one") == {"pids.max": "5", "cgroup.procs": "77"}
    (tmp_path / "m/one/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.oom_kills() == 3


def test_a_limit_that_is_off_is_not_written(tmp_path):
    group = cgroups.Group(cgroups.Hierarchy(version=1, memory=tmp_path / "m", processes=tmp_path / "p"), "one")
    (tmp_path / "m/one").mkdir(parents=True)
    (tmp_path / "p/one").mkdir(parents=True)
    group.make(LIMITS, memory=False, processes=False)
    assert content(tmp_path / "m/one") == content(tmp_path / "p/one") == {}


def test_what_this_machine_has_can_be_made_and_destroyed():
    found = cgroups.detect()
    if found is None:  # an ordinary user, or a container without any: then nothing may have been left either
        assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup", os.W_OK)
        return
    group = cgroups.Group(found, f"openforgerl-test-{os.getpid()}")
    group.make(LIMITS)
    assert all(path.is_dir() for path in group.directories)
    assert group.oom_kills() == 0
    cgroups.destroy(group.directories)
    cgroups.destroy(group.directories)  # what is gone is no error
    assert not any(path.exists() for path in group.directories)


@contextlib.contextmanager
def version_2():
    """A group of this kernel's version 2, wherever it is mounted, with whatever controllers; None without one."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    tops = [Path(target) for _, target, kind, *_ in mounts if kind == "cgroup2" and os.access(target, os.W_OK)]
    if not tops or os.geteuid() != 0:
        yield None
        return
    base = tops[0] / f"openforgerl-test-{os.getpid()}"
    base.mkdir()
    try:
        yield base
    finally:
        cgroups.destroy([*base.glob("*/"), base])


def test_a_real_group_of_version_2_takes_a_family_and_ends_it():
    with version_2() as base:
        if base is None:
            return
        group = cgroups.Group(cgroups.Hierarchy(version=2, memory=base, processes=base), "one")
        group.make(LIMITS, memory=False, processes=False)
        script = "read go; sleep 60 & sleep 60"
        with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as process:
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
            members = base / "one/cgroup.procs"
            end = time.monotonic() + 10
            while len(members.read_text().split()) < 3 and time.monotonic() < end:
                time.sleep(0.01)
            assert str(process.pid) in members.read_text().split() and len(members.read_text().split()) == 3
            cgroups.destroy(group.directories)
            assert process.wait(10) == -9
        assert list(base.glob("*/")) == [] and group.oom_kills() == 0


def test_controllers_are_switched_on_where_nobody_did_and_no_process_is_in_the_way():
    """By whatever controller version 2 has here; memory and pids are mostly taken by version 1 where both are."""
    with version_2() as base, contextlib.ExitStack() as stack:
        offered = base.parent.joinpath("cgroup.controllers").read_text().split() if base is not None else []
        if base is None or not offered:
            return
        switch = base.parent / "cgroup.subtree_control"
        if offered[0] not in switch.read_text().split():
            switch.write_text(f"+{offered[0]}")
            # last of all, when no group below has it any more
            stack.callback(lambda: (cgroups.destroy([*base.glob("*/"), base]), switch.write_text(f"-{offered[0]}")))
        (base / "probe").mkdir()
        before = {path.name for path in (base / "probe").iterdir()}
        (base / "cgroup.subtree_control").write_text(f"+{offered[0]}")
        files = {path.name for path in (base / "probe").iterdir()} - before
        (base / "cgroup.subtree_control").write_text(f"-{offered[0]}")
        wanted = {offered[0]: sorted(files)[0], "none": "none.max"}
        with subprocess.Popen(["sleep", "60"]) as process:
            (base / "cgroup.procs").write_text(str(process.pid))
            assert cgroups._controlled(base, wanted) == set()
            process.kill()
        assert cgroups._controlled(base, wanted) == {offered[0]}
        assert cgroups._controlled(base / "nowhere", wanted) == set()


def test_records_are_found_again_and_a_damaged_one_is_named(tmp_path):
    ref = ProcessRef(run_id="r", attempt_id="../a/1", token="t", boot_id="b", processes={"5": 6})
    ref.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["..%2Fa%2F1.t.json"]
    assert load_all(tmp_path) == [ref]
    assert load_all(tmp_path / "nothing") == []
    (tmp_path / "bad.json").write_text('{"run_id": 1')
    with pytest.raises(StoreError, match=r"bad\.json"):
        load_all(tmp_path)
