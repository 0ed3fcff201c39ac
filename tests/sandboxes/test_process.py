"""The process backend: what a sandbox is, runs, moves, reports and leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import InputError, StageError
from openforgerl.protocols import Sandbox, Sandboxes
from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions, probe
from openforgerl.sandboxes.refs import members, start_time
from openforgerl.types import Layer, Origin, SandboxLimits, SandboxSpec, Stage


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


async def test_it_is_what_the_protocols_say(backend, spec):
    assert isinstance(backend, ProcessSandboxes)
    typed: Sandboxes = backend
    async with typed.create(spec, "attempt") as sandbox:
        typed_one: Sandbox = sandbox
        assert typed_one.ref.backend == "process"
        assert (typed_one.ref.run_id, typed_one.ref.attempt_id) == ("run", "attempt")


async def test_a_program_runs_as_the_agent_with_nothing_but_our_environment(backend):
    spec = SandboxSpec(run_id="run", env={"FROM_SPEC": "1"})
    async with backend.create(spec, "a") as sandbox:
        end = await sandbox.exec(["env"], env={"FROM_CALL": "2"}, timeout=10)
        assert sorted(end.stdout.decode().split("\n"))[1:] == [
            "FROM_CALL=2",
            "FROM_SPEC=1",
            "HOME=/home/agent",
            "LANG=C.UTF-8",
            "LOGNAME=agent",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "SHELL=/bin/bash",
            "USER=agent",
        ]
        end = await sandbox.exec(shell("pwd; id -u; id -un; hostname; cat; echo bad >&2; exit 3"), env={},
                                 stdin=b"typed\n", timeout=10)  # fmt: skip
        assert end.stdout == b"/workspace\n1000\nagent\nsandbox\ntyped\n"
        assert (end.stderr, end.code, end.signal, end.timed_out, end.oom) == (b"bad\n", 3, None, False, False)


async def test_how_a_program_may_end(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        assert (await sandbox.exec(shell("kill -11 $$"), env={}, timeout=10)).signal == signal.SIGSEGV
        missing = await sandbox.exec(["no-such-program"], env={}, timeout=10)
        assert (missing.code, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
        refused = await sandbox.exec(["/etc/passwd"], env={}, timeout=10)
        assert (refused.code, refused.stderr) == (126, b"/etc/passwd: Permission denied\n")
        late = await sandbox.exec(["sleep", "30"], env={}, timeout=0.2)
        assert (late.timed_out, late.signal, late.code) == (True, signal.SIGKILL, None)
        assert 0.2 <= late.seconds < 5
        with pytest.raises(InputError, match="NUL"):
            await sandbox.exec(["a\0b"], env={}, timeout=1)
        with pytest.raises(InputError, match="timeout"):
            await sandbox.exec(["true"], env={}, timeout=0)


async def test_a_child_left_behind_neither_delays_nor_dies(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        end = await sandbox.exec(shell("(sleep 30.5; echo late) & echo early"), env={}, timeout=20)
        assert (end.stdout, end.code) == (b"early\n", 0) and end.seconds < 5
        # an older orphan survives another program's timeout; that program's own orphans do not
        script = "(setsid sh -c 'sleep 30.6 & sleep 30.6') & sleep 30"
        assert (await sandbox.exec(shell(script), env={}, timeout=0.5)).timed_out
        listed = await sandbox.exec(["pgrep", "-af", "sleep"], env={}, timeout=10)
        assert [line.split()[2] for line in listed.stdout.decode().splitlines() if " sleep " in line] == ["30.5"]


async def test_two_programs_at_once_and_a_large_input(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        slow = asyncio.create_task(sandbox.exec(shell("sleep 0.5; echo slow"), env={}, timeout=10))
        data = os.urandom(3 << 20)
        end = await sandbox.exec(["md5sum"], env={}, stdin=data, timeout=10)
        assert not slow.done()
        assert len(end.stdout.split()[0]) == 32
        assert (await slow).stdout == b"slow\n"
        whole = await sandbox.exec(["cat"], env={}, stdin=data, timeout=10, output_limit=4 << 20)
        assert whole.stdout == data


async def test_a_cancelled_call_kills_its_program(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        task = asyncio.create_task(sandbox.exec(["sleep", "30"], env={}, timeout=60))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.exec(["true"], env={}, timeout=5)).code == 0
        await asyncio.sleep(0.1)
        assert len(members(sandbox.report["namespaces"]["pid"])) == 1


async def test_files_go_in_and_come_out(backend, tmp_path):
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o4750)
    big = os.urandom(9 << 20)  # more than two pieces
    (source / "deep/er/big").write_bytes(big)
    (source / "empty").write_bytes(b"")
    spec = SandboxSpec(run_id="run", files={"/workspace": str(source), "/home/agent/one": str(source / "run.sh")})
    async with backend.create(spec, "a") as sandbox:
        end = await sandbox.exec(
            shell("./run.sh; stat -c '%a %U' run.sh deep ~/one; find . -type f"), env={}, timeout=9
        )
        lines = end.stdout.decode().split("\n")
        assert lines[:4] == ["ran", "750 agent", "755 agent", "750 agent"]
        assert sorted(lines[4:7]) == ["./deep/er/big", "./empty", "./run.sh"]
        assert await sandbox.read("/workspace/deep/er/big", limit=9 << 20) == big
        with pytest.raises(InputError, match="larger than the limit"):
            await sandbox.read("/workspace/deep/er/big", limit=(9 << 20) - 1)
        with pytest.raises(FileNotFoundError):
            await sandbox.read("/workspace/nothing", limit=10)
        await sandbox.write("/workspace/new/x.bin", big, mode=0o4711)
        await sandbox.write("/workspace/empty", b"full now")
        assert await sandbox.read("/workspace/empty", limit=10) == b"full now"
        end = await sandbox.exec(["stat", "-c", "%a %s", "new/x.bin"], env={}, timeout=5)
        assert end.stdout == f"711 {9 << 20}\n".encode()
        await sandbox.export(["/workspace", "/nowhere/at/all"], tmp_path / "out", limit=20 << 20)
        assert (tmp_path / "out/workspace/new/x.bin").read_bytes() == big
        assert (tmp_path / "out/workspace/run.sh").stat().st_mode & 0o7777 == 0o755
        with pytest.raises(InputError, match="not empty"):
            await sandbox.export(["/workspace"], tmp_path / "out", limit=20 << 20)
    assert not list((tmp_path / "sandboxes").iterdir())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("dd if=/dev/zero of=big bs=1k count=11 2>/dev/null", "larger than the limit of 10240 bytes"),
        ("truncate -s 1T sparse", "larger than the limit of 10240 bytes"),
        ("for i in 1 2 3; do dd if=/dev/zero of=$i bs=1k count=4 2>/dev/null; done", "larger than the limit"),
        ("mkdir -p $(seq -s / 1 70)", "deeper than 64"),
        ("touch $(seq 1 60)", "more than 50 files"),
    ],
)
async def test_an_export_that_is_too_much_is_the_policys_failure(state, spec, tmp_path, script, why):
    backend = ProcessSandboxes(SandboxOptions(export_entries=50 if "60" in script else 1000), state)
    async with backend.create(spec, "a") as sandbox:
        assert (await sandbox.exec(shell(script), env={}, timeout=10)).code == 0
        with pytest.raises(StageError, match=why) as caught:
            await sandbox.export(["/workspace"], tmp_path / "out", limit=10 << 10)
        assert (caught.value.stage, caught.value.origin) == (Stage.VERIFY, Origin.POLICY)
        assert (await sandbox.exec(["true"], env={}, timeout=5)).code == 0


async def test_names_that_are_no_utf8_survive(backend, spec, tmp_path):
    async with backend.create(spec, "a") as sandbox:
        await sandbox.exec(shell(r"printf x > $(printf '\377\n')"), env={}, timeout=5)
        await sandbox.export(["/workspace"], tmp_path / "out", limit=100)
    assert os.listdir(os.fsencode(tmp_path / "out/workspace")) == [b"\xff"]


async def test_links_do_not_go_in(backend, spec, tmp_path):
    (tmp_path / "link").symlink_to("/etc/passwd")
    async with backend.create(spec, "a") as sandbox:
        with pytest.raises(InputError, match="neither a regular file nor a directory"):
            await sandbox.write_tree(tmp_path / "link", "/workspace/x")
        for path in ("relative", "/workspace/../etc/x", "/workspace/./x", "/"):
            with pytest.raises(InputError, match=r"absolute path without"):
                await sandbox.write(path, b"")
        with pytest.raises(InputError, match="Read-only"):
            await sandbox.write("/etc/x", b"")


async def test_layers_are_read_only_and_scratch_is_not(backend, tmp_path):
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "tool").write_text("a tool\n")
    spec = SandboxSpec(
        run_id="run",
        layers=(Layer(source=str(layer), target="/opt/tool"), Layer(source=str(layer), target="/home/agent/.tool")),
        scratch=("/logs/verifier", "/tests"),
    )
    async with backend.create(spec, "a") as sandbox:
        script = (
            "cat /opt/tool/tool ~/.tool/tool; touch /opt/tool/x ~/.tool/x; touch /logs/verifier/x /tests/x && echo ok"
        )
        end = await sandbox.exec(shell(script), env={}, timeout=5)
        assert end.stdout == b"a tool\na tool\nok\n"
        assert end.stderr.count(b"Read-only file system") == 2
    assert [path.name for path in layer.iterdir()] == ["tool"]


async def test_the_listener_is_inside_and_served_here(backend, spec):
    ask = "import socket; s = socket.create_connection(('127.0.0.1', 8080)); "
    ask += "s.sendall(b'ping'); print(s.recv(9).decode())"
    async with backend.create(spec, "a") as sandbox:
        listener = sandbox.take_listener()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"got " + await reader.read(4))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, sock=listener)
        end = await sandbox.exec(["python3", "-c", ask], env={}, timeout=10)
        assert end.stdout == b"got ping\n"
        with socket.socket() as outside:  # nobody listens there on the host
            assert outside.connect_ex(("127.0.0.1", 8080)) != 0
        with pytest.raises(InputError, match="taken already"):
            sandbox.take_listener()
        taking = "import socket; s = socket.socket(); s.setsockopt(1, 15, 1); s.bind(('127.0.0.1', 8080))"
        end = await sandbox.exec(["python3", "-c", taking], env={}, timeout=10)
        assert b"Address already in use" in end.stderr
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("kind", ["address", "file", "abstract"])
async def test_an_endpoint_is_forwarded(backend, tmp_path, kind):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # until the client has said all
        writer.write(str(len(data)).encode())
        writer.close()

    if kind == "address":
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
    else:
        address = str(tmp_path / "s") if kind == "file" else f"\0openforgerl-test-{os.getpid()}"
        server = await asyncio.start_unix_server(answer, address)
    spec = SandboxSpec(run_id="run", endpoint=address, endpoint_port=9000)
    ask = "import socket; s = socket.create_connection(('127.0.0.1', 9000)); s.sendall(bytes(3000000)); "
    ask += "s.shutdown(1); print(s.recv(99).decode(), s.recv(9))"
    async with backend.create(spec, "a") as sandbox:
        ends = await asyncio.gather(*(sandbox.exec(["python3", "-c", ask], env={}, timeout=20) for _ in range(4)))
        assert [end.stdout for end in ends] == [b"3000000 b''\n"] * 4
        with pytest.raises(InputError, match=r"spec\.endpoint is set"):
            sandbox.take_listener()
        server.close()
        await server.wait_closed()
        gone = await sandbox.exec(["python3", "-c", ask], env={}, timeout=10)
        refusals = (b"ConnectionResetError", b"BrokenPipeError", b"Transport endpoint is not connected")
        assert any(refusal in gone.stderr for refusal in refusals)  # whichever call of the client meets it first


async def test_close_leaves_nothing(backend, spec, state):
    before = set(Path("/proc/mounts").read_text().splitlines())
    async with backend.create(spec, "a") as sandbox:
        detail = sandbox.ref.detail
        await sandbox.exec(shell("(setsid sleep 30 &)"), env={}, timeout=5)
        assert len(members(sandbox.report["namespaces"]["pid"])) == 2
        assert [ref.attempt_id for ref in await backend.list("run")] == ["a"]
        assert await backend.list("other") == []
    assert members(sandbox.report["namespaces"]["pid"]) == []
    assert all(start_time(int(pid)) is None for pid in detail["processes"])
    assert not any(Path(path).exists() for path in detail["cgroups"])
    assert list(state.iterdir()) == [] and set(Path("/proc/mounts").read_text().splitlines()) <= before
    with pytest.raises(InputError, match="closed"):
        await sandbox.exec(["true"], env={}, timeout=5)
    await sandbox.close()


async def test_a_sandbox_that_dies_is_said_to_have_died(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        _, init_pid = sandbox.ref.detail["processes"]
        task = asyncio.create_task(sandbox.exec(["sleep", "30"], env={}, timeout=60))
        await asyncio.sleep(0.2)
        os.kill(int(init_pid), signal.SIGKILL)
        with pytest.raises(StageError, match="ended by itself") as caught:
            await task
        assert (caught.value.kind, caught.value.origin, caught.value.retryable) == (
            "sandbox_died", Origin.INFRASTRUCTURE, True,
        )  # fmt: skip


async def test_kill_agent_believes_the_host_not_init(backend, spec):
    """The planted fault: a process in the namespace that init does not see."""
    async with backend.create(spec, "a") as sandbox:
        namespace = sandbox.report["namespaces"]["pid"]
        sandbox._vessel._launched.namespaces["pid"] = os.stat("/proc/self/ns/pid").st_ino  # as if we were inside
        with pytest.raises(StageError, match="the host sees pids") as caught:
            await sandbox.kill_agent()
        assert caught.value.stage is Stage.KILL
        sandbox._vessel._launched.namespaces["pid"] = namespace
        await sandbox.kill_agent()


async def until(namespace: int, wanted) -> None:
    """Wait for a number of live processes in a pid namespace, 10 s at most."""
    for _ in range(1000):
        if wanted(len(members(namespace))):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(members(namespace))


ORPHAN = """
import asyncio, sys
from pathlib import Path
from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions
from openforgerl.types import SandboxSpec

async def main():
    backend = ProcessSandboxes(SandboxOptions(), Path(sys.argv[1]))
    async with backend.create(SandboxSpec(run_id="run"), "a/b") as one, backend.create(SandboxSpec(run_id="x"), "c"):
        print(one.report["namespaces"]["pid"], flush=True)
        await one.exec(["sh", "-c", "setsid sleep 60 & sleep 60"], env={}, timeout=60)

asyncio.run(main())
"""


async def test_after_kill_9_of_the_owner_all_is_dead_and_can_be_swept(backend, state):
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORPHAN, str(state), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    namespace = int(await owner.stdout.readline())
    await until(namespace, lambda count: count == 4)
    (ref,) = await backend.list("run")
    assert ref.attempt_id == "a/b"
    owner.kill()
    await owner.wait()
    await until(namespace, lambda count: count == 0)  # dead by themselves, before any sweep
    groups = [Path(path) for path in ref.detail["cgroups"]]
    assert all(path.exists() for path in groups)
    assert await backend.reap("run") == 1
    assert await backend.reap("run") == 0
    assert not any(path.exists() for path in groups)
    assert await backend.reap("x") == 1
    assert list(state.iterdir()) == []


BUSY = """
import asyncio, sys
from pathlib import Path
from openforgerl.sandboxes import ProcessSandboxes, SandboxOptions
from openforgerl.types import SandboxSpec

async def one(backend, number):
    while True:
        async with backend.create(SandboxSpec(run_id="run", endpoint_port=int(sys.argv[2])), f"a{number}") as sandbox:
            await sandbox.exec(["true"], env={}, timeout=30)

async def main():
    backend = ProcessSandboxes(SandboxOptions(), Path(sys.argv[1]))
    async with backend.create(SandboxSpec(run_id="run"), "first"):
        print("ready", flush=True)
    await asyncio.gather(*(one(backend, number) for number in range(3)))

asyncio.run(main())
"""


@pytest.mark.parametrize("delay_ms", [3, 40, 90, 160, 250, 400])
async def test_kill_9_at_any_moment_of_a_life(backend, state, delay_ms):
    """In the middle of starting, running and closing: after a sweep nothing is left."""
    port = 20000 + os.getpid() % 20000 + delay_ms  # stands in the command line of bubblewrap and of our init
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BUSY, str(state), str(port), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None and await owner.stdout.readline() == b"ready\n"
    await asyncio.sleep(delay_ms / 1000)
    owner.kill()
    await owner.wait()
    left = await backend.list("run")
    groups = [Path(path) for ref in left for path in ref.detail["cgroups"]]
    assert await backend.reap("run") == len(left)
    for _ in range(500):  # one spawned in the owner's last moment, not yet bubblewrap, ends by itself
        if not running(str(port)):
            break
        await asyncio.sleep(0.01)
    assert running(str(port)) == []
    assert not any(path.exists() for path in groups)
    assert [path.name for path in state.iterdir() if path.suffix != ".tmp"] == []


async def test_a_creation_that_is_cancelled_leaves_nothing(backend, state, spec):
    port = 20000 + os.getpid() % 20000
    asked = msgspec.structs.replace(spec, endpoint_port=port)

    async def live() -> None:
        async with backend.create(asked, "a") as sandbox:
            await sandbox.exec(["sleep", "30"], env={}, timeout=60)

    for delay_ms in (1, 3, 6, 10, 15, 22, 30, 45, 70, 120):
        task = asyncio.create_task(live())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running(str(port)) == []
        assert not state.exists() or list(state.iterdir()) == []


def running(word: str) -> list[str]:
    """Command lines of this machine that have the word among their arguments, our own owner's script left out."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in words and "1" in words:
            found.append(" ".join(words)[:200])
    return found


async def test_reap_destroys_a_living_sandbox(backend, spec, state):
    async with backend.create(spec, "a") as sandbox:
        assert await ProcessSandboxes(SandboxOptions(), state).reap("run") == 1
        with pytest.raises(StageError):
            await sandbox.exec(["true"], env={}, timeout=5)
        assert members(sandbox.report["namespaces"]["pid"]) == []


async def test_an_old_record_never_kills_a_new_process(backend, spec, state):
    async with backend.create(spec, "a"):
        (path,) = state.iterdir()
        old = msgspec.json.decode(path.read_bytes())
    bystander = await asyncio.create_subprocess_exec("sleep", "30")
    started = start_time(bystander.pid)
    for change in ({"processes": {str(bystander.pid): started + 1}}, {"boot_id": "another boot"}):
        record = {**old, "cgroups": [], "processes": {str(bystander.pid): started}, **change}
        (state / path.name).write_bytes(msgspec.json.encode(record))
        assert await backend.reap("run") == 1
        assert start_time(bystander.pid) == started
    bystander.kill()
    await bystander.wait()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"workdir": "relative"}, "workdir"),
        ({"home": "/usr/home"}, "home"),
        ({"scratch": ("/etc",)}, "scratch"),
        ({"scratch": ("/a/../b",)}, "scratch"),
        ({"layers": (Layer(source="/no/such/dir", target="/opt/x"),)}, "/no/such/dir"),
        ({"layers": (Layer(source="/usr", target="/proc/x"),)}, "layer target"),
        ({"files": {"/srv/x": "/etc/passwd"}}, "/srv/x is in no writable directory"),
        ({"files": {"/tmp/x": "/no/such/file"}}, "/no/such/file does not exist"),
        ({"endpoint_port": 80}, "endpoint_port"),
    ],
)
async def test_a_spec_that_cannot_be_is_refused(backend, state, change, why):
    with pytest.raises(InputError, match=why):
        async with backend.create(SandboxSpec(run_id="run", **change), "a"):
            pass
    assert not state.exists() or list(state.iterdir()) == []


async def test_without_bubblewrap_it_refuses(state, spec, monkeypatch):
    with pytest.raises(InputError, match="not an executable"):
        async with ProcessSandboxes(SandboxOptions(bwrap="/no/bwrap"), state).create(spec, "a"):
            pass
    with pytest.raises(StageError, match="the sandbox did not start") as caught:
        async with ProcessSandboxes(SandboxOptions(bwrap="/bin/false"), state).create(spec, "a"):
            pass
    assert caught.value.origin is Origin.INFRASTRUCTURE
    assert list(state.iterdir()) == []


async def test_limits_reach_the_agent(state):
    limits = SandboxLimits(open_files=99, cpu_seconds=1, processes=50, memory_mb=300)
    async with ProcessSandboxes(SandboxOptions(cgroups="off"), state).create(
        SandboxSpec(run_id="run", limits=limits), "a"
    ) as sandbox:
        end = await sandbox.exec(["bash", "-c", "ulimit -n; ulimit -Hu; ulimit -d; ulimit -c"], env={}, timeout=5)
        assert end.stdout.split() == [b"99", b"51", str(300 << 10).encode(), b"0"]
        end = await sandbox.exec(shell("while :; do :; done"), env={}, timeout=20)
        assert end.signal in (signal.SIGXCPU, signal.SIGKILL) and not end.timed_out


def test_the_probe_says_what_this_machine_has():
    checks = {check.check: check for check in probe(SandboxOptions())}
    assert all(check.ok for name, check in checks.items() if name not in ("memory limit", "system-call filter"))
    assert checks["memory limit"].ok or checks["memory limit"].fix
    lacking = probe(SandboxOptions(bwrap="/no/bwrap"))[0]
    assert not lacking.ok and lacking.required and lacking.fix


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"sandbox\.kill_timeout"):
        SandboxOptions(kill_timeout=0)
    with pytest.raises(msgspec.ValidationError, match="guards"):
        msgspec.convert({"guards": {}}, SandboxOptions)
