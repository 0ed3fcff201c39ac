"""Attacks by consumption: memory by every way there is, disk, inodes."""

from __future__ import annotations

import pytest

from openforgerl.sandboxes.guards import Guards
from openforgerl.types import SandboxLimits

SMALL = SandboxLimits(memory_mb=128, processes=64, disk_mb=8)
PLACES = ("/workspace", "/home/agent", "/tmp", "/dev/shm", "/var/tmp")
READ_ONLY = ("/", "/dev", "/etc", "/run", "/var")


@pytest.mark.parametrize("cgroups", ["auto", "off"])
@pytest.mark.parametrize("how", ["heap", "children", "memfd", "shared"])
async def test_memory_is_bounded(cell, how, cgroups):
    async with cell(limits=SMALL, cgroups=cgroups) as inside:
        end = await inside.attack("fill_memory.py", how, 400)
        assert b"reached" not in end.stdout
        refused = b"MemoryError" in end.stderr or b"OSError" in end.stderr  # told so, where no cgroup kills
        assert end.oom or refused
        assert (await inside.sandbox.exec(["true"], env={}, timeout=5)).code == 0


@pytest.mark.parametrize("how", ["heap", "children", "memfd", "shared"])
async def test_without_the_limit_memory_is_not_bounded(cell, how):
    async with cell(Guards(memory_limit=False), limits=SMALL) as inside:
        end = await inside.attack("fill_memory.py", how, 400)
        assert end.stdout == b"reached\n" and not end.oom


@pytest.mark.parametrize("cgroups", ["auto", "off"])
async def test_a_swarm_that_offers_init_to_the_oom_killer_gains_nothing(cell, cgroups):
    """Killing its own sandbox would make an attempt our failure, to be repeated: init must never be the victim."""
    async with cell(limits=SandboxLimits(memory_mb=100, processes=400), cgroups=cgroups) as inside:
        end = await inside.attack("oom_swarm.sh")
        assert end.oom and b"reached" not in end.stdout and b"fork" not in end.stderr
        await inside.sandbox.kill_agent()
        assert (await inside.sandbox.exec(["true"], env={}, timeout=5)).code == 0


async def test_disk_is_bounded(cell):
    async with cell(limits=SMALL) as inside:
        assert await inside.words("fill_disk.py", 20, *PLACES) == ["8", "8", "7", "8", "7"]  # /tmp holds the programs
        assert await inside.words("fill_disk.py", 20, *READ_ONLY) == ["0"] * 5


@pytest.mark.process_only
async def test_without_the_limit_disk_is_not_bounded(cell):
    """A container's root belongs to root, and is not writable for the agent even where it is not read-only."""
    async with cell(Guards(disk_limit=False, read_only=False), limits=SMALL) as inside:
        assert await inside.words("fill_disk.py", 20, *PLACES, *READ_ONLY) == ["20"] * 10


async def test_files_are_bounded_in_number(cell):
    async with cell(limits=SMALL) as inside:
        end = await inside.attack("fill_inodes.py", 10_000, 2.5)
        assert end.signal == 9 and end.oom
    async with cell(Guards(disk_limit=False), limits=SMALL) as inside:
        end = await inside.attack("fill_inodes.py", 10_000, 2.5)
        assert end.stdout == b"stayed\n"


@pytest.mark.process_only
async def test_the_report_says_what_bounds_without_cgroups(cell):
    """An engine has its own cgroups."""
    async with cell(limits=SMALL, cgroups="off") as inside:
        limits = inside.sandbox.report["limits"]
        assert limits["memory"].startswith("RLIMIT_DATA 128 MB per process, watchdog 128 MB")
        assert limits["processes"] == "RLIMIT_NPROC 64"
        assert limits["disk"] == "tmpfs 8 MB each"
        assert "guards_off" not in inside.sandbox.report


async def test_the_report_says_which_guards_are_off(cell):
    async with cell(Guards(memory_limit=False, seccomp=False)) as inside:
        assert inside.sandbox.report["guards_off"] == ["seccomp", "memory_limit"]
        assert inside.sandbox.report["limits"]["memory"] == "none"
