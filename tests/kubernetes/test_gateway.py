"""Who is let in where the inits of pods dial."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from openforgerl.errors import ConfigError
from openforgerl.sandboxes.kubernetes.gateway import Gateway, Stream, credential

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


def test_a_credential_is_of_one_pod_and_one_making() -> None:
    made = {credential(KEY, "p", "1"), credential(KEY, "p", "2"), credential(KEY, "q", "1"), credential(b"", "p", "1")}
    assert len(made) == 4
    assert credential(KEY, "p", "1") in made and all(len(token) == 64 for token in made)


async def test_an_init_gets_in_by_its_own_credential_alone(gateway: Gateway, dial: Dial) -> None:
    arrived: list[Stream] = []
    token = credential(KEY, "pod-1", "n")
    gateway.expect("pod-1", token, arrived.append)
    gateway.expect("pod-2", credential(KEY, "pod-2", "n"), arrived.append)
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
    token = credential(KEY, "pod-1", "n")
    gateway.expect("pod-1", token, arrived.append)
    gateway.forget("pod-1")
    assert (await dial(gateway, "pod-1", token))[0] == 403
    assert arrived == []


async def test_after_a_restart_strangers_are_told_to_come_again_until_it_is_known_whose_they_are(dial: Dial) -> None:
    gateway = Gateway("127.0.0.1", 0, settle=60)
    await gateway.start()
    token = credential(KEY, "pod-1", "n")
    assert (await dial(gateway, "pod-1", token))[0] == 503
    gateway.expect("pod-1", token, lambda stream: stream[1].transport.abort())
    assert (await dial(gateway, "pod-1", token))[0] == 101
    assert (await dial(gateway, "pod-1", "wrong"))[0] == 403
    gateway.forget("pod-1")
    assert (await dial(gateway, "pod-1", token))[0] == 403
    gateway.settle()
    assert (await dial(gateway, "pod-2", token))[0] == 403
    await gateway.close()


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
    gateway.expect("pod-1", "", arrived.append)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    with contextlib.suppress(ConnectionError):
        writer.write(said)
        writer.write_eof()
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 403")
    writer.transport.abort()
    assert arrived == []


async def test_an_address_that_is_taken_is_named(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match="gateway_port"):
        await Gateway("127.0.0.1", gateway.port).start()
