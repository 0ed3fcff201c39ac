"""The forwarder of a sandbox's endpoint: every byte arrives, and nothing that it accepted outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from openforgerl.sandboxes.forward import Forwarder


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def upstream(answer: bytes | None) -> AsyncIterator[tuple[str, int]]:
    """Reads all and says `answer`; None: never says anything."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await over.wait()
        else:
            await reader.read()
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        over.set()
        server.close()


@pytest.mark.parametrize("turns", range(10))
async def test_a_client_of_the_last_moment_is_cut_and_not_kept(turns: int) -> None:
    """Accepted, being connected or under way when the end comes: in each turn of the loop that lies between."""
    async with upstream(None) as address:
        forwarder = Forwarder(address, most=8)
        listener = listening()
        await forwarder.start(listener)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await forwarder.close()
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""
            client.close()


async def test_an_answer_is_whole_though_its_client_has_nothing_more_to_say() -> None:
    answer = bytes(range(256)) * 4 * 1024  # 1 MiB
    async with upstream(answer) as address:
        forwarder = Forwarder(address, most=8)
        listener = listening()
        await forwarder.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(b"all that I ask")
        writer.write_eof()
        got = b""
        async with asyncio.timeout(20):
            while some := await reader.read(4096):
                got += some
                await asyncio.sleep(0.0005)  # slower than the other side
        assert got == answer
        writer.close()
        await forwarder.close()


async def test_more_clients_than_allowed_are_turned_away_until_one_leaves() -> None:
    async with upstream(b"yes") as address:
        forwarder = Forwarder(address, most=1)
        listener = listening()
        await forwarder.start(listener)

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                writer.write_eof()
                return await asyncio.wait_for(reader.read(), 5)
            except OSError:
                return b"no"
            finally:
                writer.close()

        _, held = await asyncio.open_connection(*listener.getsockname())
        await asyncio.sleep(0.05)
        assert await ask() in (b"", b"no")
        held.close()
        async with asyncio.timeout(5):
            while await ask() != b"yes":  # noqa: ASYNC110  the other side is the kernel
                await asyncio.sleep(0.01)
        await forwarder.close()
