"""Contract checks of programs: how they start, end, are limited and are killed."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from openforgerl.errors import InputError, StageError
from openforgerl.testing.contracts.case import Case, refused, shell, told
from openforgerl.types import Origin, SandboxLimits, Stage


async def a_program_gets_our_environment_and_no_other(case: Case) -> None:
    """Variables of the spec and the call, the agent's own, and none of the host's or of the engine's."""
    os.environ["OPENFORGERL_CONTRACT_SECRET"] = "of the host"
    try:
        spec = msgspec.structs.replace(case.spec, env={"FROM_SPEC": "1"})
        async with case.open().create(spec, "a-1") as sandbox:
            end = await sandbox.exec(["env"], env={"FROM_CALL": "2"}, timeout=20)
    finally:
        del os.environ["OPENFORGERL_CONTRACT_SECRET"]
    names = {line.split("=")[0] for line in end.stdout.decode().splitlines()}
    assert names == {"FROM_CALL", "FROM_SPEC", "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER"}


async def the_agent_is_nobody_special(case: Case) -> None:
    """uid 1000, no capability, no new privileges, a filter, its own host name, the work directory as its own."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        assert await told(sandbox, "id -u; id -g; pwd; stat -c %u . ~") == "1000\n1000\n/workspace\n1000\n1000\n"
        status = await told(sandbox, "grep -E 'CapEff|CapPrm|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status")
        assert [line.split()[1] for line in status.splitlines()] == ["0" * 16, "0" * 16, "0" * 16, "1", "2"]


async def how_it_ends_is_told(case: Case) -> None:
    """Exit status, signal, what cannot be executed; output and standard input."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        end = await sandbox.exec(shell("cat; echo bad >&2; exit 3"), env={}, stdin=b"typed", timeout=20)
        assert (end.stdout, end.stderr, end.code, end.signal) == (b"typed", b"bad\n", 3, None)
        assert (end.timed_out, end.oom) == (False, False)
        assert (await sandbox.exec(shell("kill -11 $$"), env={}, timeout=20)).signal == signal.SIGSEGV
        assert (await sandbox.exec(["no-such-program"], env={}, timeout=20)).code == 127
        assert (await sandbox.exec(["/etc/passwd"], env={}, timeout=20)).code == 126
        data = os.urandom(2 << 20)
        whole = await sandbox.exec(["cat"], env={}, stdin=data, timeout=30, output_limit=4 << 20)
        assert whole.stdout == data
        tail = await sandbox.exec(shell("seq 100000"), env={}, timeout=30, output_limit=7)
        assert tail.stdout == b"100000\n"
        with refused(InputError):
            await sandbox.exec([], env={}, timeout=1)


async def a_timeout_kills_the_whole_tree(case: Case) -> None:
    """`timed_out`, and nothing of it lives on, whatever signals it ignores."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        script = "trap '' TERM INT HUP; setsid sleep 77.25 & sleep 77.25"
        end = await sandbox.exec(shell(script), env={}, timeout=0.7)
        assert (end.timed_out, end.code, end.signal) == (True, None, signal.SIGKILL)
        assert await told(sandbox, "grep -lsa 77[.]25 /proc/[0-9]*/cmdline | wc -l") == "0\n"


async def a_cancelled_call_kills_its_program(case: Case) -> None:
    """Nobody waits for it: it must not go on."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        task = asyncio.create_task(sandbox.exec(["sleep", "77.5"], env={}, timeout=60))
        await asyncio.sleep(0.5)
        task.cancel()
        with refused(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        assert await told(sandbox, "grep -lsa 77[.]5 /proc/[0-9]*/cmdline | wc -l") == "0\n"


async def a_child_left_behind_delays_nothing(case: Case) -> None:
    """A service that a harness starts in the background does not hold the call, and lives on."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        end = await sandbox.exec(shell("(sleep 78.5; echo late) & echo early"), env={}, timeout=20)
        assert (end.stdout, end.code) == (b"early\n", 0) and end.seconds < 10
        assert await told(sandbox, "grep -lsa 78[.]5 /proc/[0-9]*/cmdline | wc -l") != "0\n"


async def kill_agent_kills_all_but_init(case: Case) -> None:
    """Afterwards nothing writes any more, and the sandbox still takes commands."""
    writer = "i=0; while :; do i=$((i+1)); echo $i > /workspace/count; done"
    async with case.open().create(case.spec, "a-1") as sandbox:
        await told(sandbox, f"setsid sh -c '{writer}' >/dev/null 2>&1 & sleep 0.3")
        await sandbox.kill_agent()
        first = await sandbox.read("/workspace/count", limit=100)
        await asyncio.sleep(0.3)
        assert await sandbox.read("/workspace/count", limit=100) == first
        assert await told(sandbox, "echo still here") == "still here\n"


async def memory_is_bounded_and_said(case: Case) -> None:
    """A program that takes too much is killed with `oom`, or told so; the sandbox lives."""
    limits = msgspec.structs.replace(case.spec.limits, memory_mb=160)
    async with case.open().create(msgspec.structs.replace(case.spec, limits=limits), "a-1") as sandbox:
        for grab in ("bytearray(500 << 20)", "open('/tmp/big', 'wb').write(bytes(500 << 20))"):
            end = await sandbox.exec(["python3", "-c", f"x = {grab}; print('got it')"], env={}, timeout=60)
            assert b"got it" not in end.stdout, end
            assert end.oom or b"MemoryError" in end.stderr or b"No space" in end.stderr, end
        assert not (await sandbox.exec(["true"], env={}, timeout=20)).oom


async def processes_are_bounded(case: Case) -> None:
    """A fork storm meets the limit, and kill_agent ends it."""
    limits = msgspec.structs.replace(case.spec.limits, processes=40)
    code = "import os, time\nn = 0\ntry:\n    while n < 100:\n        n += 1 if os.fork() else time.sleep(60) or 0\n"
    code += "except OSError:\n    print(n)\nelse:\n    print('all')"
    async with case.open().create(msgspec.structs.replace(case.spec, limits=limits), "a-1") as sandbox:
        end = await sandbox.exec(["python3", "-c", code], env={}, timeout=30)
        assert 10 <= int(end.stdout) <= 40, end
        await sandbox.kill_agent()
        assert await told(sandbox, "echo alive") == "alive\n"


async def disk_and_descriptors_are_bounded(case: Case) -> None:
    """Each writable directory has its size; all else cannot be written."""
    limits = SandboxLimits(memory_mb=512, processes=64, disk_mb=8, open_files=99)
    async with case.open().create(msgspec.structs.replace(case.spec, limits=limits), "a-1") as sandbox:
        for place in ("/workspace", "/home/agent", "/tmp"):
            fill = f"dd if=/dev/zero of={place}/big bs=1M count=20 2>&1; rm -f {place}/big"
            assert "No space left" in await told(sandbox, fill), place
        assert await told(sandbox, "ulimit -n") == "99\n"
        for place in ("/", "/etc", "/usr", "/usr/bin", "/opt", "/var"):
            end = await sandbox.exec(["touch", f"{place}/planted"], env={}, timeout=20)
            assert end.code == 1, place


async def one_that_dies_is_said_to_have_died(case: Case) -> None:
    """Killed from outside, as a node would: infrastructure's fault, retryable, and nothing stays."""
    if case.murder is None:
        return
    async with case.open().create(case.spec, "a-1") as sandbox:
        task = asyncio.create_task(sandbox.exec(["sleep", "30"], env={}, timeout=60))
        await asyncio.sleep(0.3)
        await case.murder(sandbox)
        with refused(StageError) as caught:
            await task
        (error,) = caught
        assert isinstance(error, StageError)
        assert (error.stage, error.origin, error.retryable) == (Stage.SANDBOX, Origin.INFRASTRUCTURE, True)
    assert await case.leftovers() == []


async def one_that_is_reaped_is_gone_for_its_owner(case: Case) -> None:
    """An owner that lost its claim gets a failure, not a hang."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        assert await case.open().reap(case.spec.run_id) == 1
        with refused(StageError):
            await sandbox.exec(["true"], env={}, timeout=5)


async def a_living_one_is_adopted(case: Case) -> None:
    """A program that one orchestrator started ends in the hands of the next."""
    if case.adopt is None:
        return
    async with case.open().create(case.spec, "a-1") as sandbox:
        await told(sandbox, "echo kept > /workspace/kept")
        heard = await sandbox.exec(shell("echo said; exit 3"), env={}, timeout=20, key="ended")
        heir = await case.adopt(case.open(), sandbox)
        assert await heir.read("/workspace/kept", limit=10) == b"kept\n"
        for _ in range(2):  # heard by the one before, and perhaps never written down
            assert await heir.claim("ended") == heard
        assert heir.ref.attempt_id == "a-1"
        await heir.close()
