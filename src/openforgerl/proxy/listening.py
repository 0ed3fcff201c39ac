"""A listening socket that serves a bounded number of connections."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

_LAST_TURNS = 4
"""Turns of the event loop in which a connection that was accepted is made known to the server."""


class BoundedListener:
    """Serves `server` on a socket, to at most `most` connections at once; further ones are closed at once.

    An agent that opens connections without end must not take the file descriptors that other attempts need.
    """

    def __init__(self, server: web.Server, listener: socket.socket, most: int) -> None:
        self._server = server
        self._listener = listener
        self._most = most
        self._made: set[asyncio.Protocol] = set()
        self._serving: asyncio.Server | None = None
        self._ended = False

    async def start(self) -> None:
        """Begin to accept."""
        self._serving = await asyncio.get_running_loop().create_server(self._protocol, sock=self._listener)

    async def stop(self) -> None:
        """Close the socket and every connection that came through it. Idempotent."""
        if self._serving is None or self._ended:
            return
        self._ended = True
        try:
            # asyncio of Python 3.11 loses a connection that is being made while its server closes: first those that
            # were accepted are made.
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            for _ in range(_LAST_TURNS):
                await asyncio.sleep(0)
        finally:
            self._serving.close()
            for connection in self._server.connections:
                if connection in self._made:
                    connection.force_close()
            self._made.clear()

    def _protocol(self) -> asyncio.Protocol:
        if len(self._made) >= self._most:
            self._made.intersection_update(self._server.connections)
        if self._ended or len(self._made) >= self._most:
            return _TurnedAway()
        connection = self._server()
        self._made.add(connection)
        return connection


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
