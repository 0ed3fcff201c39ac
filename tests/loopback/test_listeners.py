"""Sockets beside the data port: those that sandboxes hand over, and a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import aiohttp
import pytest

from openforgerl.errors import ConfigError
from openforgerl.proxy import ProxyServer
from openforgerl.rendering import ChatRenderer
from openforgerl.store import CallStore, Database

from .house import Client, ask, house, scripted


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


async def test_a_handed_over_socket_serves_agents_and_nobody_else(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        client = await home.client()
        listener = listening()
        port = listener.getsockname()[1]
        await home.proxy.add_listener(listener)
        inside = Client(home.http, client.session)
        inside.url = f"http://127.0.0.1:{port}/s/s1/v1/chat/completions"
        assert (await inside.message(ask()))["content"] == "a"
        async with home.http.get(f"http://127.0.0.1:{port}/healthz") as response:
            assert response.status == 404
        await home.proxy.remove_listener(listener)
        await home.proxy.remove_listener(listener)
        assert listener.fileno() == -1
        async with aiohttp.ClientSession() as fresh:
            inside.http = fresh
            with pytest.raises(aiohttp.ClientConnectorError):
                await inside.message(ask())
        assert (await client.message(ask()))["content"] == "a"


async def test_closing_the_proxy_closes_handed_over_sockets(tmp_path: Path, renderer: ChatRenderer) -> None:
    listeners = [listening() for _ in range(3)]
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        for listener in listeners:
            await home.proxy.add_listener(listener)
    assert [listener.fileno() for listener in listeners] == [-1, -1, -1]


@pytest.mark.parametrize("turns", range(10))
async def test_a_client_of_the_last_moment_is_cut_and_not_kept(
    turns: int, tmp_path: Path, renderer: ChatRenderer
) -> None:
    """In each turn of the loop that lies between accepting a client and knowing it."""
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        listener = listening()
        await home.proxy.add_listener(listener)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await home.proxy.remove_listener(listener)
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""
            client.close()


async def test_connections_without_end_stay_bounded(tmp_path: Path, renderer: ChatRenderer) -> None:
    """An agent that opens connections for ever keeps neither itself nor others out, once it lets go of some."""
    async with house(
        tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0}), connections_per_listener=5
    ) as home:
        client = await home.client()
        greedy, modest = listening(), listening()
        await home.proxy.add_listener(greedy)
        await home.proxy.add_listener(modest)
        port = greedy.getsockname()[1]
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 5) == b""  # closed at once
            writer.close()
        beside = Client(home.http, client.session)
        beside.url = f"http://127.0.0.1:{modest.getsockname()[1]}/s/s1/v1/chat/completions"
        assert (await beside.message(ask()))["content"] == "a"
        kept.pop()[1].close()
        await asyncio.sleep(0.05)
        beside.url = f"http://127.0.0.1:{port}/s/s1/v1/chat/completions"
        assert (await beside.message(ask()))["content"] == "a"
        await home.proxy.remove_listener(greedy)
        for reader, writer in kept:
            assert await asyncio.wait_for(reader.read(), 5) == b""  # gone with its listener
            writer.close()


async def test_a_proxy_that_is_not_started_takes_no_sockets(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with Database.open(tmp_path / "run.sqlite") as database:
        proxy = ProxyServer(engine=scripted(renderer), renderer=renderer, store=CallStore(database))
        with listening() as listener, pytest.raises(ConfigError, match="not started"):
            await proxy.add_listener(listener)
        with pytest.raises(ConfigError, match="data port"):
            _ = proxy.data_address


async def test_a_taken_port_is_said_and_leaves_nothing_behind(tmp_path: Path, renderer: ChatRenderer) -> None:
    with listening() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="address already in use"):
            async with house(tmp_path, renderer, scripted(renderer), control_port=port):
                pass


@pytest.mark.parametrize("name", ["{tmp_path}/p.sock", "\0openforgerl-test-{pid}"])
async def test_a_unix_socket(name: str, tmp_path: Path, renderer: ChatRenderer) -> None:
    path = name.format(tmp_path=tmp_path, pid=os.getpid())
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"}), unix_socket=path) as home:
        client = await home.client()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http:
            assert (await Client(http, client.session).message(ask()))["content"] == "a"
    with pytest.raises(OSError, match=r"refused|No such file"):
        await asyncio.open_unix_connection(path)
    assert [*tmp_path.glob("*.sock")] == []


async def test_a_file_in_the_place_of_the_unix_socket_is_named_and_kept(tmp_path: Path, renderer: ChatRenderer) -> None:
    path = tmp_path / "precious.txt"
    path.write_text("keep me")
    with pytest.raises(ConfigError, match=r"proxy\.unix_socket '.*precious\.txt'"):
        async with house(tmp_path, renderer, scripted(renderer), unix_socket=str(path)):
            pass
    assert path.read_text() == "keep me"


async def test_a_start_that_fails_earlier_keeps_another_proxys_socket(tmp_path: Path, renderer: ChatRenderer) -> None:
    path = str(tmp_path / "p.sock")
    async with house(tmp_path / "a", renderer, scripted(renderer), unix_socket=path) as home:
        port = home.proxy.data_address[1]
        with pytest.raises(OSError, match="in use"):
            async with house(tmp_path / "b", renderer, scripted(renderer), unix_socket=path, port=port):
                pass
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
