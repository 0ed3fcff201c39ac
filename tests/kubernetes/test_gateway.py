"""Who is let in where the inits of pods dial."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import select
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from openforgerl.errors import ConfigError
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.kubernetes.gateway import Gateway, Stream

KEY = b"k" * 32


@pytest.fixture
async def gateway() -> AsyncGenerator[Gateway]:
    opened = Gateway("127.0.0.1", 0)
    await opened.start()
    yield opened
    await opened.close()


Dial = Callable[..., Awaitable[tuple[int, Stream]]]


@pytest.fixture
async def dial() -> AsyncGenerator[Dial]:
    """`dial(gateway, pod, token)`: the status of a dial, and its connection."""
    dialled: list[asyncio.StreamWriter] = []

    async def one(
        gateway: Gateway, pod: str, token: str, *, upgrade: str = "openforgerl-sandbox"
    ) -> tuple[int, Stream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        dialled.append(writer)
        head = f"GET /v1/pods/{pod} HTTP/1.1\r\nHost: x\r\nUpgrade: {upgrade}\r\n"
        writer.write(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        return int(answer.split(b" ")[1]), (reader, writer)

    yield one
    for writer in dialled:
        writer.transport.abort()
    await asyncio.sleep(0)  # a transport is closed in the turn after


async def test_an_init_gets_in_by_its_own_credential_alone(gateway: Gateway, dial: Dial) -> None:
    arrived: list[Stream] = []
    token = Credentials(KEY, "pod-1", "n").token()
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), arrived.append)
    gateway.expect("pod-2", Credentials(KEY, "pod-2", "n"), arrived.append)
    refusals = [
        await dial(gateway, "pod-1", "wrong"),
        await dial(gateway, "pod-2", token),
        await dial(gateway, "pod-3", token),
        await dial(gateway, "pod-1", token, upgrade="websocket"),
    ]
    assert [status for status, _ in refusals] == [403] * 4
    assert arrived == [] and gateway.refused == 4
    status, (reader, writer) = await dial(gateway, "pod-1", token)
    assert status == 101
    ((theirs, ours),) = arrived
    writer.write(b"frame")
    assert await theirs.readexactly(5) == b"frame"
    ours.write(b"answer")
    assert await reader.readexactly(6) == b"answer"
    assert (await dial(gateway, "pod-1", token))[0] == 101 and len(arrived) == 2  # dialled again after a break
    for _, other in arrived:
        other.transport.abort()


async def test_a_zombie_is_shut_out(gateway: Gateway, dial: Dial) -> None:
    """An attempt that was given up: its init may run on a lost node for hours, and finds the door closed."""
    arrived: list[Stream] = []
    token = Credentials(KEY, "pod-1", "n").token()
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), arrived.append)
    gateway.forget("pod-1")
    assert (await dial(gateway, "pod-1", token))[0] == 403
    assert arrived == []


async def test_after_a_restart_strangers_are_told_to_come_again_until_it_is_known_whose_they_are(dial: Dial) -> None:
    gateway = Gateway("127.0.0.1", 0, settle=60)
    await gateway.start()
    token = Credentials(KEY, "pod-1", "n").token()
    assert (await dial(gateway, "pod-1", token))[0] == 503
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), lambda stream: stream[1].transport.abort())
    assert (await dial(gateway, "pod-1", token))[0] == 101
    assert (await dial(gateway, "pod-1", "wrong"))[0] == 403
    gateway.forget("pod-1")
    assert (await dial(gateway, "pod-1", token))[0] == 403
    gateway.settle()
    assert (await dial(gateway, "pod-2", token))[0] == 403
    await gateway.close()


async def test_who_is_awaited_is_let_in_before_anybody_takes_the_connection(gateway: Gateway, dial: Dial) -> None:
    """A sandbox whose adoption comes late dials at once, and again when its connection breaks."""
    arrived: list[Stream] = []
    token = Credentials(KEY, "pod-1", "n").token()
    gateway.keep("pod-1", Credentials(KEY, "pod-1", "n"))
    assert (await dial(gateway, "pod-1", "wrong"))[0] == 403
    _, (broken, _) = await dial(gateway, "pod-1", token)
    status, (_, writer) = await dial(gateway, "pod-1", token)
    assert status == 101 and await broken.read() == b""  # the newest is the one in use
    writer.write(b"hello")
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), arrived.append)
    ((theirs, ours),) = arrived
    assert await theirs.readexactly(5) == b"hello"
    gateway.keep("pod-1", Credentials(KEY, "pod-1", "n"))  # too late: it has its taker
    assert (await dial(gateway, "pod-1", token))[0] == 101 and len(arrived) == 2
    for _, end in arrived:
        end.transport.abort()
    assert ours.transport.is_closing()


@pytest.mark.parametrize("end", ["successor", "forget", "close"])
async def test_a_connection_that_nobody_takes_is_closed(gateway: Gateway, dial: Dial, end: str) -> None:
    arrived: list[Stream] = []
    token = Credentials(KEY, "pod-1", "n").token()
    gateway.keep("pod-1", Credentials(KEY, "pod-1", "n"))
    status, (reader, _) = await dial(gateway, "pod-1", token)
    assert status == 101
    if end == "successor":  # a pod of the same name that was made anew
        gateway.expect("pod-1", Credentials(KEY, "pod-1", "m"), arrived.append)
    elif end == "forget":
        gateway.forget("pod-1")
    else:
        await gateway.close()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 2) == b""
    assert arrived == []


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\r\n\r\n",
        b"\x00" * 100,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9000,
        b"POST /v1/pods/pod-1 HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_dial_is_dropped(gateway: Gateway, said: bytes) -> None:
    arrived: list[Stream] = []
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), arrived.append)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    with contextlib.suppress(ConnectionError):
        writer.write(said)
        writer.write_eof()
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 403")
    writer.transport.abort()
    assert arrived == []


def besiege(port: int, addresses: list[str], full: threading.Event, over: threading.Event) -> None:
    """Hold a connection from each address (as often as it is listed), say nothing, and open what is dropped anew."""
    held: list[socket.socket] = []
    while not over.is_set():
        with contextlib.suppress(OSError):
            while len(held) < len(addresses):
                source = (addresses[len(held)], 0)
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1, source_address=source))
        full.set()
        poll = select.poll()
        for one in held:
            poll.register(one, select.POLLIN)
        dropped = {number for number, _ in poll.poll(20)}
        for one in [one for one in held if one.fileno() in dropped]:
            held.remove(one)
            one.close()
    for one in held:
        one.close()


@pytest.mark.parametrize(
    ("count", "addresses"),
    [(1100, ("127.0.0.2",)), (1100, ("127.0.0.1",)), (300, ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"))],
    ids=["another-address", "the-same-address", "many-addresses"],
)
async def test_who_says_nothing_locks_nobody_out(
    gateway: Gateway, dial: Dial, count: int, addresses: tuple[str, ...]
) -> None:
    """An agent has its init's address, and behind a translating node or gateway that of many other inits too."""
    token = Credentials(KEY, "pod-1", "n").token()
    gateway.expect("pod-1", Credentials(KEY, "pod-1", "n"), lambda stream: stream[1].transport.abort())
    full, over = threading.Event(), threading.Event()
    siege = asyncio.create_task(asyncio.to_thread(besiege, gateway.port, [*addresses] * count, full, over))
    try:
        await asyncio.to_thread(full.wait, 10)
        for _ in range(5):
            status, _ = await asyncio.wait_for(dial(gateway, "pod-1", token), 2)
            assert status == 101
            await asyncio.sleep(0.1)
    finally:
        over.set()
        await siege
    assert gateway.dropped > 0


async def test_a_whole_clusters_inits_come_from_one_address(gateway: Gateway, dial: Dial) -> None:
    """Address translation, and a restarted orchestrator: 700 inits dial in the same instant, each as init does."""
    arrived: set[str] = set()

    async def come(number: int) -> None:
        name = f"pod-{number}"
        credentials = Credentials(KEY, name, "n")

        def taken(stream: Stream) -> None:
            arrived.add(name)
            stream[1].transport.abort()

        gateway.expect(name, credentials, taken)
        tries = 0
        while name not in arrived:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await dial(gateway, name, credentials.token())
            tries += 1
            await asyncio.sleep(0.1 * 2**tries * random.uniform(0.5, 1.5))

    async with asyncio.timeout(20):
        await asyncio.gather(*(come(number) for number in range(700)))
    assert len(arrived) == 700


async def test_strangers_leave_descriptors_for_pods() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (800, hard))
        gateway = Gateway("127.0.0.1", 0)
        await gateway.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    full, over = threading.Event(), threading.Event()
    addresses = [f"127.0.0.{number}" for number in range(2, 8)] * 60
    siege = asyncio.create_task(asyncio.to_thread(besiege, gateway.port, addresses, full, over))
    await asyncio.to_thread(full.wait, 10)
    most = 0
    for _ in range(20):
        most = max(most, gateway.waiting)
        await asyncio.sleep(0.02)
    over.set()
    await siege
    await gateway.close()
    assert 150 < most <= 200  # a quarter of the descriptors


async def test_who_says_nothing_does_not_stay(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openforgerl.sandboxes.kubernetes.gateway._HEAD_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.transport.abort()
    assert gateway.waiting == 0


async def test_an_address_that_is_taken_is_named(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match="gateway_port"):
        await Gateway("127.0.0.1", gateway.port).start()
