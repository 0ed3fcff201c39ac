"""An init that dials: its connection may break, its host may be another one afterwards, and no program runs twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from openforgerl.errors import InputError
from openforgerl.sandboxes.bubblewrap import find_bwrap
from openforgerl.sandboxes.channel import Channel, Gone
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.inside.init import MOST_KEPT
from openforgerl.sandboxes.runtime import build_runtime, cache_directory, command
from openforgerl.sandboxes.spec import INIT_HOME, init_settings
from openforgerl.sandboxes.transfer import Tree
from openforgerl.types import SandboxSpec

TOKEN = "a-credential"
PATIENCE = 20.0


class Host:
    """Where init dials in: hands out streams, and answers refusals when told to."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.heads: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.status = "101 Switching Protocols"
        self.server: asyncio.Server | None = None

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        except (asyncio.IncompleteReadError, OSError):
            return  # it ended while it dialled
        writer.write(f"HTTP/1.1 {self.status}\r\n\r\n".encode())
        if self.status.startswith("101"):
            self.streams.put_nowait((reader, writer))
        else:
            writer.close()

    async def arrival(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(20):
            return await self.streams.get()


@asynccontextmanager
async def dialling(
    host: Host, *, before: Sequence[str] = (), **settings: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Our init as PID 1 of a namespace of its own, in this machine's network. `before`: words before its command."""
    port = await host.start()
    runtime = await asyncio.to_thread(build_runtime, cache_directory())
    words = [*before, str(find_bwrap(None)), "--unshare-user", "--unshare-pid", "--as-pid-1"]
    words += ["--uid", "1000", "--gid", "1000"]
    words += ["--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    words += ["--symlink", "usr/bin", "/bin", "--ro-bind", str(runtime.path), INIT_HOME, "--proc", "/proc"]
    words += ["--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--tmpfs", "/home/agent"]
    words += ["--die-with-parent", "--clearenv", "--setenv", "OPENFORGERL_TOKEN", TOKEN, "--"]
    asked = {"host": "127.0.0.1", "port": port, "path": "/sandbox/one", "token_env": "OPENFORGERL_TOKEN"}
    words += command("dial", json.dumps({**asked, "patience": PATIENCE, **settings}))
    process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert host.server is not None
        host.server.close()
        await asyncio.sleep(0.05)  # it may have dialled again when the channel was closed
        for writer in host.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def begun(host: Host, patience: float = PATIENCE, credentials: Credentials | None = None) -> Channel:
    reader, writer = await host.arrival()
    channel = await Channel.dialled(reader, writer, patience=patience, credentials=credentials)
    await channel.call("start", init_settings(SandboxSpec(run_id="r"), Guards(), watched=False))
    return channel


def program(script: str, key: str = "", timeout: float = 30.0) -> dict:
    env = {"PATH": "/usr/bin:/bin"}
    return {"argv": ["sh", "-c", script], "env": env, "cwd": "/workspace", "timeout": timeout, "output_limit": 1000,
            "gate": False, "key": key}  # fmt: skip


async def cut(channel: Channel) -> None:
    """The connection breaks, as by a network that fails."""
    channel._writer.transport.abort()


async def test_it_shows_its_credential_and_hides_it_from_programs() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        (head,) = host.heads
        assert head.startswith("GET /sandbox/one HTTP/1.1\r\n")
        assert f"Authorization: Bearer {TOKEN}\r\n" in head and "Upgrade: openforgerl-sandbox\r\n" in head
        look = "cat /proc/1/environ /proc/1/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c credential; env | wc -l"
        answer, output = await channel.call("exec", program(look))
        assert (answer["code"], output.split()) == (0, [b"0", b"2"])  # PATH, and the shell's own PWD
        assert channel.hello is not None and len(channel.hello.namespaces) == 7
        await channel.close()


async def test_a_program_that_is_being_started_shows_nothing_of_init() -> None:
    """Between fork and exec it still has init's memory and environment, hence the credential, and no filter yet."""
    attack = Path(__file__).parents[1] / "attacks/programs/read_newborns.py"
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        await channel.call("write", {"path": "/tmp/attack.py", "offset": 0, "mode": 0o644}, attack.read_bytes())
        words = ["/usr/bin/python3", "/tmp/attack.py", TOKEN, "/tmp/stop"]
        spy = asyncio.create_task(channel.call("exec", {**program("", timeout=120.0), "argv": words}))
        for _ in range(300):
            await channel.call("exec", {**program(""), "argv": ["true"]})
        await channel.call("exec", program("touch /tmp/stop"))
        answer, output = await spy
        assert (answer["code"], output) == (0, b"\n")
        await channel.close()


@pytest.mark.parametrize(("own", "programs"), [(0, 900), (950, 950)])
async def test_init_is_killed_last_for_want_of_memory(own: int, programs: int) -> None:
    """A score above 900 is what a kubelet gives a pod of little memory, and nobody inside may lower it."""
    host = Host()
    async with dialling(host, before=["sh", "-c", f'echo {own} > /proc/self/oom_score_adj; exec "$@"', "sh"]):
        channel = await begun(host)
        _, output = await channel.call("exec", program("cat /proc/self/oom_score_adj /proc/1/oom_score_adj"))
        assert output == f"{programs}\n{own}\n".encode()
        await channel.close()


async def test_a_program_lives_through_a_broken_connection_and_runs_once() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        script = "echo started >> /workspace/starts; sleep 1; cat /workspace/starts"
        running = asyncio.create_task(channel.call("exec", program(script)))
        await asyncio.sleep(0.4)
        await cut(channel)
        await channel.rejoin(*await host.arrival())
        answer, output = await running
        assert (answer["code"], output) == (0, b"started\n")
        # its end came over the second connection and is acknowledged: a third hello does not name it
        await cut(channel)
        await channel.rejoin(*await host.arrival())
        assert (await channel.call("ping", {}))[0]["done"]
        await channel.close()


async def test_an_end_that_came_while_nobody_listened_is_told_later() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        running = asyncio.create_task(
            channel.call("exec", program("sleep 0.5; echo done > /workspace/x; echo out; exit 3"))
        )
        await asyncio.sleep(0.2)
        await cut(channel)
        reader, writer = await host.arrival()
        await asyncio.sleep(1.0)  # it has ended by now
        await channel.rejoin(reader, writer)
        answer, output = await running
        assert (answer["code"], output) == (3, b"out\n")
        await channel.close()


async def test_what_is_asked_while_disconnected_is_done_once_connected(tmp_path: Path) -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        await channel.call("write", {"path": "/workspace/a", "offset": 0, "mode": 0o644}, bytes(3 << 20))
        await cut(channel)
        stream = await host.arrival()
        await asyncio.sleep(0.1)
        asked = [
            asyncio.create_task(channel.call("read", {"path": "/workspace/a", "limit": 4 << 20}, most=4 << 20)),
            asyncio.create_task(channel.call("write", {"path": "/workspace/b", "offset": 0, "mode": 0o644}, b"b")),
        ]
        await asyncio.sleep(0.1)
        await channel.rejoin(*stream)
        assert (await asked[0])[1] == bytes(3 << 20)
        await asked[1]
        assert (await channel.call("read", {"path": "/workspace/b", "limit": 4}))[1] == b"b"
        tree = Tree(tmp_path / "out", limit=10, entries=10, modes=0o777)
        tree.take({"entry": "file", "path": "/x", "mode": 0o644}, b"")
        tree.take({"data": True}, b"123456789")
        tree.restart()
        tree.take({"entry": "file", "path": "/y", "mode": 0o644}, b"")
        tree.take({"data": True}, b"987654321")
        tree.end()
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {"y": b"987654321"}
        await channel.close()


async def test_the_next_host_takes_programs_over() -> None:
    """As after a restart of the orchestrator: one program ended meanwhile, one still runs, one is of no use."""
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        for key, script in (("short", "echo short"), ("long", "sleep 1.5; echo long"), ("useless", "sleep 60.25")):
            asyncio.create_task(channel.call("exec", program(script, key))).add_done_callback(
                lambda task: task.exception()
            )
        await asyncio.sleep(0.1)
        last = channel._last
        await channel.close()
        heir = await Channel.dialled(*await host.arrival(), patience=PATIENCE)
        # what had ended before the host went away was acknowledged, perhaps: who knows whether it was written down
        assert heir.programs() == ["long", "short", "useless"]
        assert heir.hello is not None and heir.hello.last >= last
        answer, output = await heir.claim("long")
        assert (answer["code"], output) == (0, b"long\n")
        with pytest.raises(InputError, match="no program with the key 'lost'"):
            await heir.claim("lost")
        _, output = await heir.call("exec", program("grep -lsa 60[.]25 /proc/[0-9]*/cmdline | wc -l"))
        assert int(output) > 0
        await heir.close()
        # it died as well, with what it had heard
        for _ in range(2):
            heir = await Channel.dialled(*await host.arrival(), patience=PATIENCE)
            for key in ("long", "short", "long"):
                answer, output = await heir.claim(key)
                assert (answer["code"], output.decode()) == (0, f"{key}\n")
            await heir.close()


async def test_of_many_ends_only_the_last_are_kept() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        for number in range(MOST_KEPT + 2):
            await channel.call("exec", program("exit 3", f"key-{number:02}"))
        await channel.call("exec", program("echo later; exit 4", "key-07"))
        for _ in range(3):
            await channel.call("exec", program("true"))  # without a key: gone when it is acknowledged
        await channel.close()
        heir = await Channel.dialled(*await host.arrival(), patience=PATIENCE)
        assert heir.programs() == [f"key-{number:02}" for number in range(3, MOST_KEPT + 2)]
        assert heir.hello is not None and len(heir.hello.programs) == MOST_KEPT
        answer, output = await heir.claim("key-07")
        assert (answer["code"], output) == (4, b"later\n")  # the last of that name
        await heir.close()


async def test_a_program_that_nobody_waits_for_any_more_is_killed_after_a_rejoin() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        running = asyncio.create_task(channel.call("exec", program("sleep 60.75")))
        await asyncio.sleep(0.2)
        await cut(channel)
        stream = await host.arrival()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channel.rejoin(*stream)
        await asyncio.sleep(0.3)
        _, output = await channel.call("exec", program("grep -lsa 60[.]75 /proc/[0-9]*/cmdline | wc -l"))
        assert output == b"0\n"
        await channel.close()


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "410 Gone"])
async def test_one_that_is_refused_ends_with_all_it_runs(status: str) -> None:
    """Fencing: whoever is not wanted any more must not go on."""
    host = Host()
    async with dialling(host) as process:
        channel = await begun(host)
        host.status = status
        await channel.close()
        async with asyncio.timeout(10):
            await process.wait()


async def test_one_that_is_told_to_come_again_comes_again() -> None:
    host = Host()
    host.status = "503 Service Unavailable"
    async with dialling(host) as process:
        await asyncio.sleep(1.0)
        assert process.returncode is None and len(host.heads) >= 2
        host.status = "101 Switching Protocols"
        channel = await begun(host)
        await channel.close()


async def test_patience_ends_on_both_sides() -> None:
    host = Host()
    async with dialling(host, patience=1.0) as process:
        channel = await begun(host, patience=0.5)
        running = asyncio.create_task(channel.call("exec", program("sleep 60")))
        await asyncio.sleep(0.2)
        assert host.server is not None
        host.server.close()
        await cut(channel)
        with pytest.raises(Gone):
            await running
        async with asyncio.timeout(10):
            await process.wait()


async def test_another_init_is_not_taken_for_the_same() -> None:
    host, other = Host(), Host()
    async with dialling(host), dialling(other):
        channel = await begun(host)
        await cut(channel)
        with pytest.raises(Gone):
            await channel.rejoin(*await other.arrival())
        await channel.close()


def shown(host: Host) -> list[str]:
    """The credential of each dial."""
    lines = [line for head in host.heads for line in head.split("\r\n")]
    return [line.removeprefix("Authorization: Bearer ") for line in lines if line.startswith("Authorization")]


async def test_every_connection_is_made_by_a_credential_of_its_own() -> None:
    """What stands in the sandbox's environment is worth nothing once a program runs."""
    host, row = Host(), Credentials(b"key", "pod", "nonce")
    async with dialling(host):
        channel = await begun(host, credentials=row)
        assert not row.admits(row.token(0)) and row.following()[0] == 2  # it was taken before `start` was answered
        for number in (1, 2):
            await cut(channel)
            stream = await host.arrival()
            assert shown(host)[number:] == [row.token(number)] and row.admits(row.token(number))
            await channel.rejoin(*stream)
            await channel.call("ping", {})
            assert not row.admits(row.token(number))
        await channel.close()
        stream = await host.arrival()
        # whoever restarted knows the key, and no number
        row = Credentials(b"key", "pod", "nonce", first=1)
        assert shown(host)[3] == row.token(3) and row.admits(shown(host)[3])
        heir = await Channel.dialled(*stream, patience=PATIENCE, credentials=row)
        await heir.call("ping", {})
        assert row.following()[0] == 5
        await heir.close()


async def test_a_connection_that_breaks_while_the_next_credential_is_handed_over_locks_nobody_out() -> None:
    host, row = Host(), Credentials(b"key", "pod", "nonce")
    async with dialling(host):
        channel = await begun(host, credentials=row)
        taken = [row.following()[0]]
        for number in range(12):
            await cut(channel)
            stream = await host.arrival()
            assert row.admits(shown(host)[-1]), number
            await channel.rejoin(*stream)
            if number % 3:
                await asyncio.sleep(0.0007 * number)  # before it is sent, read, answered or heard
                await cut(channel)
                stream = await host.arrival()
                assert row.admits(shown(host)[-1]), number
                await channel.rejoin(*stream)
            await channel.call("ping", {})
            taken.append(row.following()[0])
        assert taken == sorted(set(taken))  # always a later one
        await channel.close()


async def dial_as(host: Host, words: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A program that got hold of a credential, and says what init would say; the host's end of its connection."""
    assert host.server is not None
    reader, writer = await asyncio.open_connection(*host.server.sockets[0].getsockname())
    host.writers.append(writer)
    writer.write(b"GET /sandbox/one HTTP/1.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    text = json.dumps({"id": 0, "hello": 1, "last": 0, "programs": [], **words}).encode()
    writer.write(len(text).to_bytes(4, "big") + bytes(4) + text)
    return await host.arrival()


async def test_a_second_dialler_cannot_take_over_while_the_first_answers() -> None:
    host = Host()
    async with dialling(host):
        channel = await begun(host)
        assert channel.hello is not None
        running = asyncio.create_task(channel.call("exec", program("sleep 1; echo mine")))
        for _ in range(3):
            stream = await dial_as(host, {"namespaces": channel.hello.namespaces})
            with pytest.raises(Gone, match="still answers"):
                await channel.rejoin(*stream)
            assert stream[1].transport.is_closing()
        answer, output = await running
        assert (answer["code"], output) == (0, b"mine\n")
        await channel.close()


async def test_a_silent_first_connection_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that vanished without a word leaves a connection that nobody ends. A mute newcomer holds nobody up."""
    monkeypatch.setattr("openforgerl.sandboxes.channel._PING_SECONDS", 0.5)
    host = Host()
    await host.start()
    assert host.server is not None
    first = await dial_as(host, {"namespaces": {"pid": 1}})
    channel = await Channel.dialled(*first, patience=PATIENCE)
    _, writer = await asyncio.open_connection(*host.server.sockets[0].getsockname())
    writer.write(b"GET /sandbox/one HTTP/1.1\r\n\r\n")
    mute = asyncio.create_task(channel.rejoin(*await host.arrival()))
    await asyncio.sleep(0.1)
    begun_at = time.monotonic()
    await channel.rejoin(*await dial_as(host, {"namespaces": {"pid": 1}}))
    assert 0.4 < time.monotonic() - begun_at < 3.0
    mute.cancel()
    await asyncio.gather(mute, return_exceptions=True)
    await channel.close()
    with pytest.raises(Gone):
        await channel.rejoin(*await dial_as(host, {"namespaces": {"pid": 1}}))
    host.server.close()
    for end in [*host.writers, writer]:
        end.transport.abort()
    await asyncio.sleep(0)


async def test_the_proxy_is_reached_through_inits_own_relay() -> None:
    """Large, in both directions, several at once; a proxy that is gone is a reset."""

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read())).encode() + bytes(1 << 20))
        await writer.drain()
        writer.close()

    proxy = await asyncio.start_server(count, "127.0.0.1", 0)
    port = 20_000 + os.getpid() % 20_000
    host = Host()
    async with dialling(host, forward=list(proxy.sockets[0].getsockname()), listen=port):
        channel = await begun(host)
        ask = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(bytes(3000000)); "
        ask += "s.shutdown(1); d = b''.join(iter(lambda: s.recv(65536), b'')); print(d[:7].decode(), len(d))"
        asked = {**program(""), "argv": ["/usr/bin/python3", "-c", ask]}
        answers = await asyncio.gather(*(channel.call("exec", asked) for _ in range(4)))
        assert [output for _, output in answers] == [b"3000000 1048583\n"] * 4
        proxy.close()
        answer, _ = await channel.call("exec", asked)
        assert answer["code"] == 1
        assert (await channel.call("ping", {}))[0]["done"]
        await channel.close()


def test_init_refuses_to_be_anything_but_pid_1() -> None:
    """Its kill reaches every process that it may signal."""
    runtime = build_runtime(cache_directory())
    start = f"import sys; sys.path.insert(0, {str(runtime.path)!r}); from inside.init import main; main()"
    python = f"{runtime.path}/python/bin/python3"
    words = [
        f"{runtime.path}/ld",
        "--library-path",
        f"{runtime.path}/lib",
        python,
        "-I",
        "-S",
        "-c",
        start,
        "dial",
        "{}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "must be PID 1" in done.stderr
