"""The line between sandbox and proxy, which can be hung up in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Line:
    """Forwards bytes to `proxy`. `async with` opens and closes it."""

    def __init__(self, proxy: tuple[str, int]) -> None:
        self._proxy = proxy
        self._server: asyncio.Server | None = None
        self._callers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Line:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._callers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def address(self) -> tuple[str, int]:
        """What the sandbox connects to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def hang_up(self) -> None:
        """Close every connection; what was sent arrives before the end does."""
        for caller in self._callers.values():
            caller.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._callers[task] = writer
        task.add_done_callback(self._callers.pop)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._proxy)
        ways = [asyncio.create_task(_pump(reader, up_writer)), asyncio.create_task(_pump(up_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            up_writer.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
