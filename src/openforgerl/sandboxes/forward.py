"""Bytes between a sandbox's endpoint and one address of the host."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from openforgerl.sandboxes.accepting import stop_accepting


class Forwarder:
    """Serves a listening socket of the sandbox by connecting each client to `address`, and nothing else."""

    def __init__(self, address: tuple[str, int] | str, most: int) -> None:
        """`address`: host and port, or the path of a Unix socket. `most`: simultaneous connections."""
        self._address = address
        self._most = most
        self._server: asyncio.Server | None = None
        self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Take over the listener."""
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        self._ended = True
        if self._server is not None:
            await stop_accepting(self._server)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ended or len(self._tasks) >= self._most:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not in the task: what is cancelled before its first step runs no `finally`. The client sees a reset, as it
        # would without us in between.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._address, str):
                up_reader, up_writer = await asyncio.open_unix_connection(self._address)
            else:
                up_reader, up_writer = await asyncio.open_connection(*self._address)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, up_writer))
                group.create_task(_pump(up_reader, writer))
            for one in (up_writer, writer):  # what is still to be sent, is
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
        finally:
            up_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of one direction; a reset ends both, because the peer will read the end too."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        return
    writer.transport.abort()
