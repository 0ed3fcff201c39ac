"""Where the init of a pod dials in: one TCP port, one short HTTP exchange, then the frames of `channel.py`.

A pod is admitted by its own credential, which is worth nothing once its attempt is over: the init of a pod on a lost
node, which nobody can kill, finds the door closed (fencing).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import Callable

from openforgerl.errors import ConfigError

log = logging.getLogger(__name__)

UPGRADE = "openforgerl-sandbox"
PATH = "/v1/pods/"
"""Before the pod's name."""
_HEAD_LIMIT = 8192
_HEAD_SECONDS = 10.0
_STREAM_LIMIT = 1 << 20
_MOST_WAITING = 1024
"""Connections that have not shown a credential yet."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def credential(key: bytes, pod: str, nonce: str) -> str:
    """A pod's credential. Derived, so that a restarted orchestrator knows those of the pods it finds."""
    return hmac.new(key, f"{pod}\n{nonce}".encode(), hashlib.sha256).hexdigest()


class Gateway:
    """Admits inits and hands each one's stream to whoever expects it."""

    def __init__(self, listen: str, port: int, *, settle: float = 0.0) -> None:
        """`settle`: seconds in which a stranger may yet be found to be ours (after a restart) and is not sent away."""
        self._listen = listen
        self._settled_at = time.monotonic() + settle
        self._over: set[str] = set()
        self._wanted_port = port
        self._server: asyncio.Server | None = None
        self._expected: dict[str, tuple[bytes, Callable[[Stream], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused = 0
        """Dials with a wrong or dead credential, for the report."""

    async def start(self) -> None:
        """Listen. ConfigError when the address is taken or not ours."""
        try:
            self._server = await asyncio.start_server(
                self._accept, self._listen, self._wanted_port, limit=_STREAM_LIMIT, backlog=1024
            )
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen on {self._listen}, port {self._wanted_port} (sandbox.kubernetes."
                f"gateway_listen, gateway_host, gateway_port): {error.strerror or error}"
            ) from error

    @property
    def port(self) -> int:
        """The port in use."""
        if self._server is None:
            raise ConfigError("the gateway is not started")
        return int(self._server.sockets[0].getsockname()[1])

    def expect(self, pod: str, token: str, arrived: Callable[[Stream], None]) -> None:
        """Admit `pod` by `token` from now on, again and again (a broken connection is dialled anew)."""
        self._over.discard(pod)
        self._expected[pod] = (_hashed(token), arrived)

    def forget(self, pod: str) -> None:
        """Refuse `pod` from now on: its attempt is over, whatever still runs of it."""
        self._expected.pop(pod, None)
        self._over.add(pod)

    def settle(self) -> None:
        """No stranger can be ours any more."""
        self._settled_at = 0.0

    async def close(self) -> None:
        """Stop listening. Streams that were handed over are their takers'."""
        self._expected.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MOST_WAITING:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._greet(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await _head(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError) as error:
            log.debug("a connection to the gateway said nothing that is HTTP: %s", error)
            writer.transport.abort()
            return
        expected = self._admitted(head)
        if expected is None:
            self.refused += 1
            pod = _pod_of(head)
            final = pod in self._over or pod in self._expected or time.monotonic() >= self._settled_at
            status = "403 Forbidden" if final else "503 Service Unavailable"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            writer.close()
            return
        _keep_alive(writer)
        words = f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {UPGRADE}\r\nConnection: Upgrade\r\n\r\n"
        writer.write(words.encode())
        expected((reader, writer))

    def _admitted(self, head: dict[str, str]) -> Callable[[Stream], None] | None:
        found = self._expected.get(_pod_of(head))
        token = head.get("authorization", "").removeprefix("Bearer ")
        if found is None or head.get("upgrade", "").lower() != UPGRADE:
            return None
        return found[1] if hmac.compare_digest(found[0], _hashed(token)) else None


def _pod_of(head: dict[str, str]) -> str:
    """Whom a dial says it is; empty when it says nothing."""
    words = head.get(":request", "").split(" ")
    return words[1].removeprefix(PATH) if len(words) == 3 and words[0] == "GET" and words[1].startswith(PATH) else ""


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """A request's head: lower-case names, and the request line as `:request`."""
    data = await reader.readuntil(b"\r\n\r\n")
    if len(data) > _HEAD_LIMIT:
        raise asyncio.LimitOverrunError("the head is too long", len(data))
    request, *lines = data.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return {":request": request} | {name.strip().lower(): value.strip() for name, _, value in pairs}


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A node that vanished sends no FIN; the kernel's probes end the stream within a minute."""
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
