"""An init that has been subverted: it answers each command with whatever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from openforgerl.errors import StageError
from openforgerl.sandboxes import LiveSandbox, SandboxOptions
from openforgerl.sandboxes.channel import Channel
from openforgerl.sandboxes.guards import Guards
from openforgerl.types import Origin, SandboxRef, SandboxSpec, Stage

FRAME = struct.Struct(">II")


def packed(header: Any, payload: bytes = b"") -> bytes:
    """A frame. `header`: an object, or the bytes in its place."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return FRAME.pack(len(text), len(payload)) + text + payload


class Liar:
    """The other end of a channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.written = 0

    async def say(self, header: Any, payload: bytes = b"") -> None:
        """Waits until the host takes it."""
        data = packed(header, payload)
        self.writer.write(data)
        await self.writer.drain()
        self.written += len(data)


Answer = Callable[[Liar, dict[str, Any]], Awaitable[None]]


@asynccontextmanager
async def channel_to(answer: Answer) -> AsyncIterator[tuple[Channel, Liar]]:
    """A channel whose every command `answer` answers."""
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    liar = Liar(*await asyncio.open_unix_connection(sock=theirs))

    async def serve() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head, body = FRAME.unpack(await liar.reader.readexactly(FRAME.size))
                header = json.loads(await liar.reader.readexactly(head))
                await liar.reader.readexactly(body)
                await answer(liar, header)

    task = asyncio.create_task(serve())
    try:
        yield channel, liar
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await channel.close()
        liar.writer.transport.abort()
        await asyncio.sleep(0)


class PaperVessel:
    """A vessel of nothing; `failures`: how often its destruction fails."""

    def __init__(self, failures: int = 0) -> None:
        self.ref = SandboxRef(backend="paper", run_id="run", attempt_id="a", detail={})
        self.gated = False
        self.failures = failures
        self.destroyed = 0
        self.recorded = True

    def admit(self, pid: int) -> None:
        del pid

    def oom_kills(self) -> int:
        return 0

    def survivors(self) -> str:
        return ""

    async def obituary(self) -> StageError:
        return StageError(Stage.SANDBOX, "sandbox_died", "gone", origin=Origin.INFRASTRUCTURE, retryable=True)

    async def destroy(self) -> None:
        self.destroyed += 1
        if self.destroyed <= self.failures:
            raise StageError(Stage.SANDBOX, "engine", "busy", origin=Origin.INFRASTRUCTURE, retryable=True)
        self.recorded = False


@asynccontextmanager
async def sandbox_of(answer: Answer, vessel: PaperVessel | None = None) -> AsyncIterator[tuple[LiveSandbox, Liar]]:
    """A sandbox around such an init."""
    async with channel_to(answer) as (channel, liar):
        yield (
            LiveSandbox(
                SandboxSpec(run_id="run"),
                vessel or PaperVessel(),
                channel,
                SandboxOptions(export_entries=50, kill_timeout=1.0),
                Guards(),
            ),
            liar,
        )
