"""The end of a listening server, without a connection that nobody owns."""

from __future__ import annotations

import asyncio

_TURNS = 4
"""Turns of the event loop in which a connection that was accepted is made known to its server."""


async def stop_accepting(server: asyncio.Server) -> None:
    """Close the server once what it had accepted is known to it. The caller cuts the connections.

    asyncio of Python 3.11 loses a connection that is being made while its server closes: it stays open, and is
    nobody's, until the garbage collector comes by.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    try:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
    finally:
        server.close()
