"""Attacks by processes: storms, survivors, late writers, and attacks on our init."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.refs import members
from openforgerl.types import SandboxLimits


def alive(cell) -> list[int]:
    """Host pids in the sandbox, our init left out; seen from the host."""
    report = cell.sandbox.report
    return members(report["namespaces"]["pid"])[1:]


@pytest.mark.parametrize("cgroups", ["auto", "off"])
async def test_the_process_limit_stops_a_storm(cell, cgroups):
    async with cell(limits=SandboxLimits(processes=64), cgroups=cgroups) as inside:
        end = await inside.attack("fork_many.py", 150, 0)
        assert int(end.stdout) == 63  # 64 with itself
        await inside.sandbox.kill_agent()
        assert alive(inside) == []


async def test_without_the_process_limit_the_storm_passes(cell):
    async with cell(Guards(process_limit=False), limits=SandboxLimits(processes=64)) as inside:
        assert int((await inside.attack("fork_many.py", 150, 0)).stdout) == 150


async def test_kill_ends_a_storm_that_never_rests(cell):
    async with cell(limits=SandboxLimits(processes=100)) as inside:
        storm = asyncio.create_task(inside.attack("fork_storm.py", timeout=50))
        await asyncio.sleep(1.0)
        assert len(alive(inside)) > 20
        await inside.sandbox.kill_agent()
        assert alive(inside) == []
        assert (await storm).signal == 9
        assert await inside.words("families.py") == []  # the sandbox still works


async def test_a_timeout_ends_a_storm_too(cell):
    async with cell(limits=SandboxLimits(processes=100)) as inside:
        end = await inside.attack("fork_storm.py", timeout=1.0)
        assert end.timed_out and end.signal == 9
        assert alive(inside) == []


async def test_a_timeout_kills_who_ignores_every_signal(cell):
    async with cell() as inside:
        end = await inside.attack("ignore_signals.py", timeout=0.7)
        assert (end.timed_out, end.signal, end.stdout) == (True, 9, b"ready\n")
        assert alive(inside) == []


async def watch_file(inside) -> tuple[bytes, bytes]:
    """The late writer's file after `kill_agent`, and 0.3 s later."""
    await inside.attack("late_writer.py", "/workspace/answer")
    assert int(await inside.sandbox.read("/workspace/answer", limit=100)) > 0
    await inside.sandbox.kill_agent()
    first = await inside.sandbox.read("/workspace/answer", limit=100)
    await asyncio.sleep(0.3)
    return first, await inside.sandbox.read("/workspace/answer", limit=100)


async def test_nothing_is_written_after_the_kill(cell):
    async with cell() as inside:
        first, later = await watch_file(inside)
        assert first == later
        assert alive(inside) == []


async def test_with_a_kill_of_process_groups_only_the_late_writer_goes_on(cell):
    async with cell(Guards(complete_kill=False)) as inside:
        first, later = await watch_file(inside)
        assert first != later
        assert len(alive(inside)) == 1


async def test_init_cannot_be_harmed(cell):
    async with cell() as inside:
        assert await inside.words("attack_init.py") == []
        assert (await inside.sandbox.exec(["true"], env={}, timeout=5)).code == 0


async def test_a_dumpable_init_shows_its_descriptors(cell):
    async with cell(Guards(undumpable=False)) as inside:
        assert {"descriptors", "environment"} <= set(await inside.words("attack_init.py", "look"))


async def test_without_the_filter_init_gets_the_agents_limits(cell):
    async with cell(Guards(seccomp=False)) as inside:
        assert {"limits", "affinity", "priority"} <= set(await inside.words("attack_init.py"))


async def test_proc_offers_no_knob(cell):
    async with cell() as inside:
        assert await inside.words("proc_tricks.py") == []


@pytest.mark.process_only
async def test_as_the_hosts_root_proc_would_offer_knobs(cell):
    """An engine mounts /proc/sys read-only, whoever the agent is."""
    async with cell(Guards(own_host_uid=False)) as inside:
        opened = await inside.words("proc_tricks.py")
    # an ordinary user's kernel identity is unprivileged anyway: there is nothing to switch off
    assert ("/proc/sys/kernel/core_pattern" in opened) == (os.geteuid() == 0)


async def test_the_agent_holds_no_descriptor_of_ours(cell):
    async with cell() as inside:
        end = await inside.sandbox.exec(["sh", "-c", "echo /proc/self/fd/*"], env={}, timeout=5)
        assert end.stdout.decode().split() == [f"/proc/self/fd/{number}" for number in (0, 1, 2, 3)]  # 3: the listing


async def test_a_flood_of_output_is_cut_to_its_tail(cell):
    async with cell() as inside:
        flood = "import sys\nfor i in range(3000000): sys.stdout.write('%09d\\n' % i)"
        end = await inside.sandbox.exec(["python3", "-c", flood], env={}, timeout=30, output_limit=20)
        assert end.stdout == b"002999998\n002999999\n"


@pytest.mark.parametrize("leave", [True, False])
async def test_a_storm_on_inits_pipes_holds_nobody_up(cell, leave):
    async with cell(limits=SandboxLimits(processes=64)) as inside:
        begun = time.monotonic()
        storm = asyncio.create_task(inside.attack("pipe_storm.py", 30, *["leave"] * leave, timeout=3.0))
        await asyncio.sleep(0.5)
        assert (await inside.sandbox.exec(["true"], env={}, timeout=10)).code == 0
        end = await storm
        assert (end.code, end.timed_out) == ((7, False) if leave else (None, True))
        assert time.monotonic() - begun < 15 and len(end.stdout) <= 65536 and len(end.stderr) <= 65536
        await inside.sandbox.kill_agent()
        assert alive(inside) == []


async def test_a_stop_is_no_end(cell):
    """A program that has itself traced by init, its parent, is reported to it when it stops."""
    async with cell() as inside:
        end = await inside.attack("traced.py", timeout=1.0)
        assert (end.code, end.signal, end.timed_out) == (None, 9, True)
        assert alive(inside) == []


async def test_no_namespace_can_be_made(cell):
    async with cell() as inside:
        assert await inside.words("new_spaces.py") == []


async def test_with_capabilities_and_all_calls_namespaces_can_be_made(cell):
    async with cell(Guards(seccomp=False, no_capabilities=False)) as inside:
        assert {"unshare:user", "clone:user", "clone3:user"} <= set(await inside.words("new_spaces.py"))
