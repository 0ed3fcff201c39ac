"""The control socket of a sandbox, from the host's side: commands to our init and its answers.

The frames are those of `inside/frames.py`. Several commands may be under way at once; each answer names its id.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

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


class Hello(msgspec.Struct, frozen=True):
    """What a dialled init says first: who it is, and what it still does for whoever directed it before."""

    last: int
    """The highest command id that it has seen."""
    programs: Sequence[tuple[int, str, bool]]
    """Command id, key and "is running" of each program whose end nobody has acknowledged."""
    namespaces: dict[str, int]


class Channel:
    """Use `call` for one answer, `stream` for many.

    With `patience` the connection may break: commands under way wait so many seconds for `rejoin`, are then sent
    again, and no program runs twice. Without, its end is the end of the sandbox.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        patience: float | None = None,
        hello: Hello | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._patience = patience
        self.hello = hello
        self._unclaimed = {number: key for number, key, _ in hello.programs} if hello is not None else {}
        self._answers: dict[int, asyncio.Queue[tuple[Header, bytes] | None]] = {}
        self._pending: dict[int, bytes] = {}
        self._last = hello.last if hello is not None else 0
        self._open = True
        self._connected = True
        self._reason: Exception | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """On a connected Unix stream socket, which it owns from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    @classmethod
    async def dialled(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, patience: float, timeout: float = 30.0
    ) -> Channel:
        """On a connection that an init has dialled: waits for its hello. Raises Gone, TimeoutError."""
        return cls(reader, writer, patience=patience, hello=await _hello(reader, timeout))

    async def rejoin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float = 30.0) -> None:
        """Go on over a new connection of the same init. Raises Gone when it is another, TimeoutError without hello."""
        hello = await _hello(reader, timeout)
        if self.hello is None or hello.namespaces != self.hello.namespaces:
            writer.transport.abort()
            raise Gone
        await self._halt()
        if self._expiry is not None:
            self._expiry.cancel()
        self._reader, self._writer, self._connected = reader, writer, True
        for number, _, running in hello.programs:
            if number not in self._answers and number not in self._unclaimed:
                # nobody waits for it any more: its caller has gone, or has the end already
                self._write({"op": "cancel" if running else "ack", "id": 0, "target": number})
        for number, command in self._pending.items():
            self._answers[number].put_nowait(({"restart": True}, b""))
            self._writer.write(command)
        self._task = asyncio.create_task(self._read(reader))

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
        async with aclosing(self.stream(op, header, payload)) as frames:
            return await self._joined(frames, started)

    async def claim(self, key: str) -> tuple[Header, bytes]:
        """The end of a program that an earlier host started with this `key`. InputError when there is none."""
        number = next((number for number, name in self._unclaimed.items() if name == key), None)
        if number is None:
            raise InputError(f"no program with the key {key!r} in this sandbox; there are {self.programs()}")
        del self._unclaimed[number]
        command = _pack({"op": "claim", "id": 0, "target": number}, b"")
        async with aclosing(self._converse(number, command, program=True)) as frames:
            return await self._joined(frames, None)

    def programs(self) -> list[str]:
        """Keys of the programs that an earlier host started and nobody has claimed."""
        return sorted(set(self._unclaimed.values()))

    async def stream(
        self, op: str, header: dict[str, JsonValue], payload: bytes = b""
    ) -> AsyncGenerator[tuple[Header, bytes]]:
        """Send a command and yield its frames up to the one marked `done`; one marked `restart` begins them anew.

        When the caller stops early, a program that the command started is killed.
        """
        self._last += 1
        command = _pack({**header, "op": op, "id": self._last}, payload)
        async with aclosing(self._converse(self._last, command, program=op == "exec")) as frames:
            async for frame in frames:
                yield frame

    async def close(self) -> None:
        """Close the socket, which ends the sandbox unless init may dial again."""
        self._open = False
        if self._expiry is not None:
            self._expiry.cancel()
        await self._halt()
        self._end_all()

    async def _converse(self, number: int, command: bytes, *, program: bool) -> AsyncGenerator[tuple[Header, bytes]]:
        queue: asyncio.Queue[tuple[Header, bytes] | None] = asyncio.Queue()
        self._answers[number] = queue
        finished = False
        try:
            if self._patience is not None:
                self._pending[number] = command
            await self._send(command)
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
            self._pending.pop(number, None)
            if program and self._open and self._connected:
                if not finished:
                    self._write({"op": "cancel", "id": 0, "target": number})
                elif self._patience is not None:
                    self._write({"op": "ack", "id": 0, "target": number})

    async def _joined(
        self, frames: AsyncGenerator[tuple[Header, bytes]], started: Callable[[int], None] | None
    ) -> tuple[Header, bytes]:
        data: list[bytes] = []
        last: Header = {}
        async for frame, piece in frames:
            if frame.get("restart"):
                data.clear()
                continue
            last = frame
            data.append(piece)
            if started is not None and "started" in frame:
                started(int(frame["started"]))
                await self._send(_pack({"op": "go", "id": 0, "target": frame["id"]}, b""))
        return last, b"".join(data)

    async def _send(self, command: bytes) -> None:
        if not self._open:
            raise Gone from self._reason
        if not self._connected:
            return  # `rejoin` sends it
        try:
            self._writer.write(command)
            await self._writer.drain()
        except OSError as error:
            if self._patience is None:
                raise Gone from error

    def _write(self, header: Header) -> None:
        self._writer.write(_pack(header, b""))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header, payload = await _frame(reader)
                queue = self._answers.get(header["id"])
                if queue is not None:
                    queue.put_nowait((header, payload))
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError, TypeError) as error:
            self._reason = error  # the end of the sandbox, or an init that cannot be trusted
        self._connected = False
        if self._patience is None:
            self._expire()
        else:
            self._writer.transport.abort()
            self._expiry = asyncio.get_running_loop().call_later(self._patience, self._expire)

    def _expire(self) -> None:
        self._open = False
        self._end_all()

    async def _halt(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._connected = False
        self._writer.transport.abort()  # not close(): an init that hangs would keep what is still buffered

    def _end_all(self) -> None:
        for queue in self._answers.values():
            queue.put_nowait(None)


async def _frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """The next frame. Raises ValueError for what is none, IncompleteReadError at the end."""
    head, body = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    if head > _MOST_HEADER or body > _MOST_PAYLOAD:
        raise ValueError(f"a frame of {head} and {body} bytes")
    return json.loads(await reader.readexactly(head)), await reader.readexactly(body)


async def _hello(reader: asyncio.StreamReader, timeout: float) -> Hello:
    try:
        async with asyncio.timeout(timeout):
            header, _ = await _frame(reader)
        return msgspec.convert(header, Hello)
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise Gone from error


def _pack(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), len(payload)) + text + payload


def _refusal(header: Header) -> Exception:
    """The error that an answer carries. A `limit` is the agent's doing: it wrote what is too large."""
    # An agent's file names need be no text, and what is said here ends in records that take nothing else.
    kind, message = header.get("kind"), str(header["error"]).encode("utf-8", "backslashreplace").decode()
    if kind == "limit":
        return StageError(Stage.VERIFY, "too_large", message, origin=Origin.POLICY, retryable=False)
    if kind == "missing":
        return FileNotFoundError(message)
    if kind == "io":
        return OSError(message)
    return InputError(message)
