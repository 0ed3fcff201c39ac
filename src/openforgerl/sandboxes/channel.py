"""The control socket of a sandbox, from the host's side: commands to our init and its answers.

The frames are those of `inside/frames.py`. Several commands may be under way at once; each answer names its id.
What comes is bounded and checked as if the agent had sent it: it might have found a way into its init.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import msgspec

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.types import JsonValue, Origin, Stage

_FRAME = struct.Struct(">II")
_MOST_HEADER = 1 << 20
_MOST_PAYLOAD = 32 << 20
_MOST_WAITING = 32 << 20
"""Bytes of one answer that may wait for whoever asked; more is not read from the connection meanwhile."""
_FRAME_COST = 256
"""Bytes that a frame counts beyond its payload, so that empty ones are not free."""
_OBJECT_COST = 16
"""Bytes of objects that a byte of JSON can become, about."""
_MOST_ANSWER = 1 << 20
"""Bytes that an answer may have beyond what it was asked to carry."""
_PING_SECONDS = 5.0
"""How long a connection is asked whether it lives before another may take its place."""
MOST_STDIN = 16 << 20
"""Bytes of standard input that one program may get."""
MOST_OUTPUT = 64 << 20
"""Bytes of output of a program whose own limit is not known here."""

Header = dict[str, Any]


class Gone(Exception):
    """The sandbox ended."""


class Unsound(Gone):
    """It said what our init does not say: it is damaged, or not ours any more."""


class Hello(msgspec.Struct, frozen=True):
    """What a dialled init says first: who it is, and what it still does for whoever directed it before."""

    last: int
    """The highest command id that it has seen."""
    programs: Sequence[tuple[int, str, bool]]
    """Command id, key and "is running" of each program that has a key, or whose end nobody has acknowledged."""
    namespaces: dict[str, int]


class _Answer:
    """What has come for one command and waits to be taken."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[tuple[tuple[Header, bytes] | None, int]] = asyncio.Queue()
        self._waiting = 0
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, header: Header, payload: bytes, cost: int) -> None:
        """Waits until there is room for more. `cost`: bytes that it takes here, about."""
        await self._room.wait()
        self.give((header, payload), cost)

    def give(self, frame: tuple[Header, bytes] | None, cost: int = 0) -> None:
        """Without waiting: what this side itself says. None is the end."""
        self._frames.put_nowait((frame, cost))
        self._waiting += cost
        if self._waiting > _MOST_WAITING:
            self._room.clear()

    async def get(self) -> tuple[Header, bytes] | None:
        frame, cost = await self._frames.get()
        self._waiting -= cost
        if self._waiting <= _MOST_WAITING:
            self._room.set()
        return frame

    def leave(self) -> None:
        """Nobody takes anything any more."""
        self._room.set()
        self._waiting = -1 << 60


class Channel:
    """Use `call` for one answer, `stream` for many.

    With `patience` the connection may break: commands under way wait so many seconds for `rejoin`, are then sent
    again, and no program runs twice. Without, its end is the end of the sandbox. With `credentials`, init is handed
    the next one over each connection, before anything else.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        patience: float | None = None,
        hello: Hello | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.patience = patience
        self.hello = hello
        self._credentials = credentials
        self._handed = (0, 0)
        """Id of the command that handed a credential over, and the credential's number."""
        self._found = {number: key for number, key, _ in hello.programs} if hello is not None else {}
        self._answers: dict[int, _Answer] = {}
        self._pending: dict[int, bytes] = {}
        self._last = hello.last if hello is not None else 0
        self._open = True
        self._connected = True
        self._heard = asyncio.Event()
        self._joining = asyncio.Lock()
        self._reason: Exception | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._read(reader))
        self._hand_over()

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """On a connected Unix stream socket, which it owns from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    @classmethod
    async def dialled(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        patience: float,
        credentials: Credentials | None = None,
        timeout: float = 30.0,
    ) -> Channel:
        """On a connection that an init has dialled: waits for its hello. Raises Gone, TimeoutError."""
        return cls(reader, writer, patience=patience, hello=await _hello(reader, timeout), credentials=credentials)

    async def rejoin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float = 30.0) -> None:
        """Go on over a new connection of the same init.

        Raises Gone, having ended that connection, when it is another's or the one before it still answers;
        TimeoutError without hello.
        """
        hello = await _hello(reader, timeout)
        async with self._joining:
            refusal = await self._refused(hello)
            if refusal:
                writer.transport.abort()
                raise Gone(refusal)
            await self._halt()
            if not self._open:  # closed meanwhile
                writer.transport.abort()
                raise self._gone()
            if self._expiry is not None:
                self._expiry.cancel()
            self._reader, self._writer, self._connected = reader, writer, True
            self._hand_over()
            for number, _, running in hello.programs:
                if number not in self._answers and number not in self._found:
                    # nobody waits for it any more: its caller has gone, or has the end already
                    self._write({"op": "cancel" if running else "ack", "id": 0, "target": number})
            for number, command in self._pending.items():
                self._answers[number].give(({"restart": True}, b""))
                self._writer.write(command)
            self._task = asyncio.create_task(self._read(reader))

    async def call(
        self,
        op: str,
        header: dict[str, JsonValue],
        payload: bytes = b"",
        *,
        most: int = 0,
        started: Callable[[int], None] | None = None,
    ) -> tuple[Header, bytes]:
        """Send a command; its last frame with all payloads joined. Raises Gone, or what the answer says.

        `most`: bytes of payload that it asks for. `started` (`exec` only) gets the pid inside of the forked process,
        which goes on when it has returned.
        """
        async with aclosing(self.stream(op, header, payload)) as frames:
            return await self._joined(frames, most, started)

    async def claim(self, key: str, *, most: int = MOST_OUTPUT) -> tuple[Header, bytes]:
        """The end of the program that an earlier host started (last) with this `key`; as often as it is asked for.

        InputError when there is none.
        """
        number = max((number for number, name in self._found.items() if name == key), default=None)
        if number is None:
            raise InputError(f"no program with the key {key!r} in this sandbox; there are {self.programs()}")
        command = _pack({"op": "claim", "id": 0, "target": number}, b"")
        async with aclosing(self._converse(number, command, program=True)) as frames:
            return await self._joined(frames, most, None)

    def programs(self) -> list[str]:
        """Keys of the programs that an earlier host started."""
        return sorted(set(self._found.values()))

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
        answer = _Answer()
        self._answers[number] = answer
        finished = False
        try:
            if self.patience is not None:
                self._pending[number] = command
            await self._send(command)
            while not finished:
                frame = await answer.get()
                if frame is None:
                    finished = True
                    raise self._gone()
                finished = bool(frame[0].get("done"))
                if "error" in frame[0]:
                    raise _refusal(frame[0])
                yield frame
        finally:
            del self._answers[number]
            answer.leave()
            self._pending.pop(number, None)
            if program and self._open and self._connected:
                if not finished:
                    self._write({"op": "cancel", "id": 0, "target": number})
                elif self.patience is not None:
                    self._write({"op": "ack", "id": 0, "target": number})

    async def _joined(
        self, frames: AsyncGenerator[tuple[Header, bytes]], most: int, started: Callable[[int], None] | None
    ) -> tuple[Header, bytes]:
        data: list[bytes] = []
        size, last = 0, Header()
        async for frame, piece in frames:
            if frame.get("restart"):
                data.clear()
                size = 0
                continue
            size += len(piece) + _FRAME_COST
            if size > most + most // 256 + _MOST_ANSWER:
                raise Unsound(f"an answer of more than the {most} bytes that were asked for")
            last = frame
            data.append(piece)
            if started is not None and "started" in frame:
                started(_number(frame["started"]))
                await self._send(_pack({"op": "go", "id": 0, "target": frame["id"]}, b""))
        return last, b"".join(data)

    async def _send(self, command: bytes) -> None:
        if not self._open:
            raise self._gone()
        if not self._connected:
            return  # `rejoin` sends it
        try:
            self._writer.write(command)
            await self._writer.drain()
        except OSError as error:
            if self.patience is None:
                raise Gone from error

    def _write(self, header: Header) -> None:
        self._writer.write(_pack(header, b""))

    def _hand_over(self) -> None:
        if self._credentials is not None:
            number, token = self._credentials.following()
            self._last += 1
            self._handed = (self._last, number)
            self._write({"op": "credential", "id": self._last, "token": token})

    async def _refused(self, hello: Hello) -> str:
        """Why a connection with this hello must not take over; empty when it may."""
        if self.hello is None or hello.namespaces != self.hello.namespaces:
            return "it is another process"
        if self._connected:
            self._heard.clear()
            self._write({"op": "ping", "id": 0})
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._heard.wait()
            except TimeoutError:
                return ""
        if not self._open:
            return "the sandbox has ended"
        return "the connection before it still answers" if self._connected else ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header, payload, cost = await _frame(reader)
                self._heard.set()
                number = header["id"]
                if self._credentials is not None and number == self._handed[0]:
                    self._credentials.taken(self._handed[1])
                answer = self._answers.get(number)
                if answer is not None:
                    await answer.put(header, payload, cost)
        except (asyncio.IncompleteReadError, OSError) as error:
            self._reason = error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._reason = Unsound(f"{type(error).__name__}: {error}"[:300])
        self._connected = False
        self._heard.set()
        if self.patience is None or isinstance(self._reason, Unsound):
            self._writer.transport.abort()
            self._expire()
        else:
            self._writer.transport.abort()
            self._expiry = asyncio.get_running_loop().call_later(self.patience, self._expire)

    def _gone(self) -> Gone:
        if isinstance(self._reason, Unsound):
            return self._reason
        gone = Gone()
        gone.__cause__ = self._reason
        return gone

    def _expire(self) -> None:
        self._open = False
        self._end_all()

    async def _halt(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._connected = False
        self._writer.transport.abort()  # not close(): an init that hangs would keep what is still buffered

    def _end_all(self) -> None:
        for answer in self._answers.values():
            answer.give(None)


async def _frame(reader: asyncio.StreamReader) -> tuple[Header, bytes, int]:
    """The next frame, and what keeping it costs in bytes, about.

    Raises ValueError, RecursionError for what is none, IncompleteReadError at the end.
    """
    head, body = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    if head > _MOST_HEADER or body > _MOST_PAYLOAD:
        raise ValueError(f"a frame of {head} and {body} bytes")
    text = (await reader.readexactly(head)).decode("ascii")
    header = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return _said(header), await reader.readexactly(body), body + _OBJECT_COST * head + _FRAME_COST


def _said(header: Header) -> Header:
    """All that it says as text that records take and terminals show; an entry's path stays what it is: a name."""
    said = _printable(header)
    return said | {"path": header["path"]} if "entry" in header and "path" in header else said


def _printable(value: Any) -> Any:
    match value:
        case str():
            if value.isprintable():
                return value
            # an agent's file names need be no text, and may hold what a terminal obeys
            return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {_printable(name): _printable(item) for name, item in value.items()}
        case _:
            return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"the number {word}")
    return number


def _number(value: object) -> int:
    if type(value) is not int:
        raise Unsound(f"{value!r:.100} where a number belongs")
    return value


async def _hello(reader: asyncio.StreamReader, timeout: float) -> Hello:
    try:
        async with asyncio.timeout(timeout):
            header, _, _ = await _frame(reader)
        return msgspec.convert(header, Hello)
    except TimeoutError:
        raise
    except (asyncio.IncompleteReadError, OSError, ValueError, RecursionError) as error:
        raise Gone(f"no hello: {type(error).__name__}: {error}"[:300]) from error


def _pack(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), len(payload)) + text + payload


def _refusal(header: Header) -> Exception:
    """The error that an answer carries. A `limit` is the agent's doing: it wrote what is too large."""
    kind, message = header.get("kind"), str(header["error"])[-2000:]
    if kind == "limit":
        return StageError(Stage.VERIFY, "too_large", message, origin=Origin.POLICY, retryable=False)
    if kind == "missing":
        return FileNotFoundError(message)
    if kind == "io":
        return OSError(message)
    return InputError(message)
