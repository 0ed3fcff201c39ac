"""The control socket of a sandbox, from the host's side: commands to our init and its answers.

The frames are those of `inside/frames.py`. Several commands may be under way at once; each answer names its id.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from openforgerl.errors import InputError, StageError
from openforgerl.types import JsonValue, Origin, Stage

_FRAME = struct.Struct(">II")
_MOST_HEADER = 8 << 20
_MOST_PAYLOAD = 32 << 20
MOST_STDIN = 16 << 20
"""Bytes of standard input that one program may get."""

Header = dict[str, Any]


class Gone(Exception):
    """The sandbox ended, or said something that is no frame."""


class Channel:
    """Use `call` for one answer, `stream` for many."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Queue[tuple[Header, bytes] | None]] = {}
        self._last = 0
        self._open = True
        self._reason: Exception | None = None
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """On a connected stream socket, which it owns from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    async def call(
        self,
        op: str,
        header: dict[str, JsonValue],
        payload: bytes = b"",
        *,
        started: Callable[[int], None] | None = None,
    ) -> tuple[Header, bytes]:
        """Send a command; its last frame with all payloads joined. Raises Gone, or what the answer says.

        `started` (`exec` only) gets the pid inside of the forked process, which goes on when it has returned.
        """
        data: list[bytes] = []
        last: Header = {}
        async with aclosing(self.stream(op, header, payload)) as frames:
            async for frame, piece in frames:
                last = frame
                data.append(piece)
                if started is not None and "started" in frame:
                    started(int(frame["started"]))
                    await self._send({"op": "go", "id": 0, "target": frame["id"]}, b"")
        return last, b"".join(data)

    async def stream(
        self, op: str, header: dict[str, JsonValue], payload: bytes = b""
    ) -> AsyncGenerator[tuple[Header, bytes]]:
        """Send a command and yield its frames up to the one marked `done`.

        When the caller stops early, a program that the command started is killed.
        """
        self._last += 1
        number = self._last
        queue: asyncio.Queue[tuple[Header, bytes] | None] = asyncio.Queue()
        self._answers[number] = queue
        finished = False
        try:
            await self._send({**header, "op": op, "id": number}, payload)
            while not finished:
                frame = await queue.get()
                if frame is None:
                    finished = True
                    raise Gone from self._reason
                finished = bool(frame[0].get("done"))
                if "error" in frame[0]:
                    raise _refusal(frame[0])
                yield frame
        finally:
            del self._answers[number]
            if not finished and op == "exec" and self._open:
                self._writer.write(_pack({"op": "cancel", "id": 0, "target": number}, b""))

    async def close(self) -> None:
        """Close the socket, which ends the sandbox."""
        self._open = False
        self._task.cancel()
        await asyncio.wait([self._task])
        self._writer.transport.abort()  # not close(): an init that hangs would keep what is still buffered
        self._end_all()

    async def _send(self, header: Header, payload: bytes) -> None:
        if not self._open:
            raise Gone from self._reason
        try:
            self._writer.write(_pack(header, payload))
            await self._writer.drain()
        except OSError as error:
            raise Gone from error

    async def _read(self) -> None:
        try:
            while True:
                head, body = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if head > _MOST_HEADER or body > _MOST_PAYLOAD:
                    break
                header = json.loads(await self._reader.readexactly(head))
                payload = await self._reader.readexactly(body)
                queue = self._answers.get(header["id"])
                if queue is not None:
                    queue.put_nowait((header, payload))
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError, TypeError) as error:
            self._reason = error  # the end of the sandbox, or an init that cannot be trusted
        self._open = False
        self._end_all()

    def _end_all(self) -> None:
        for queue in self._answers.values():
            queue.put_nowait(None)


def _pack(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), len(payload)) + text + payload


def _refusal(header: Header) -> Exception:
    """The error that an answer carries. A `limit` is the agent's doing: it wrote what is too large."""
    kind, message = header.get("kind"), str(header["error"])
    if kind == "limit":
        return StageError(Stage.VERIFY, "too_large", message, origin=Origin.POLICY, retryable=False)
    if kind == "missing":
        return FileNotFoundError(message)
    if kind == "io":
        return OSError(message)
    return InputError(message)
