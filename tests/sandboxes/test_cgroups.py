"""Control groups: both versions against a folder that looks like one, and the real ones of this machine."""

from __future__ import annotations

import os
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


def test_records_are_found_again_and_a_damaged_one_is_named(tmp_path):
    ref = ProcessRef(run_id="r", attempt_id="../a/1", token="t", boot_id="b", processes={"5": 6})
    ref.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["..%2Fa%2F1.t.json"]
    assert load_all(tmp_path) == [ref]
    assert load_all(tmp_path / "nothing") == []
    (tmp_path / "bad.json").write_text('{"run_id": 1')
    with pytest.raises(StoreError, match=r"bad\.json"):
        load_all(tmp_path)
