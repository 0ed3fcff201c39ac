"""Where the init of a pod dials in: one TCP port, one short HTTP exchange, then the frames of `channel.py`.

A pod is admitted by its own credentials, each of which is worth nothing once init has the next, and all once its
attempt is over: the init of a pod on a lost node, which nobody can kill, finds the door closed (fencing).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from openforgerl.errors import ConfigError
from openforgerl.sandboxes.accepting import stop_accepting
from openforgerl.sandboxes.credentials import Credentials

log = logging.getLogger(__name__)

UPGRADE = "openforgerl-sandbox"
PATH = "/v1/pods/"
"""Before the pod's name."""
_HEAD_LIMIT = 8192
_HEAD_SECONDS = 5.0
"""An init sends its head with the first packet, so this is slack for a slow network and for our own event loop."""
_STREAM_LIMIT = 1 << 20
_MOST_WAITING = 1024
"""Connections that have not shown a credential yet, all together; less where few descriptors are allowed."""
_SHARE = 4
"""One address may hold a quarter of them: 256, where a node has some 110 pods. An agent has the address of its init,
and address translation may give one to all pods of a node or of a cluster, so none is ever shut out: who is over its
share, or the greediest when all are taken, loses its oldest connection. An init's own is oldest for milliseconds at
most, and what one burst of more than 256 inits loses comes back by itself, spread over the next second."""
_BACKLOG = 1024
_AT_ONCE = 8
"""Connections taken in one turn of the event loop. It takes up to four turns until what has arrived on one is read, in
which far fewer than a share may come behind it: a flood drops its own."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Gateway:
    """Admits inits and hands each one's stream to whoever expects it."""

    def __init__(self, listen: str, port: int, *, settle: float = 0.0) -> None:
        """`settle`: seconds in which a stranger may yet be found to be ours (after a restart) and is not sent away."""
        self._listen = listen
        self._settled_at = time.monotonic() + settle
        self._over: set[str] = set()
        self._wanted_port = port
        self._server: asyncio.Server | None = None
        self._ended = False
        self._expected: dict[str, tuple[Credentials, Callable[[Stream], None]]] = {}
        self._kept: dict[str, Stream] = {}
        self._waiting: dict[str, dict[asyncio.Task[None], asyncio.StreamWriter]] = {}
        self._most = _MOST_WAITING
        self.refused = 0
        """Dials with a wrong or dead credential, for the report."""
        self.dropped = 0
        """Connections that had shown none yet and were dropped to make room, for the report."""

    async def start(self) -> None:
        """Listen. ConfigError when the address is taken or not ours."""
        # What strangers hold must leave descriptors for pods, proxy and database.
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed != resource.RLIM_INFINITY:
            self._most = max(_SHARE, min(_MOST_WAITING, allowed // 4))
        try:
            self._server = await asyncio.start_server(
                self._accept, self._listen, self._wanted_port, limit=_STREAM_LIMIT, backlog=_AT_ONCE
            )
            for listener in self._server.sockets:  # asyncio has one number for both; the kernel's is the larger
                with socket.socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(_BACKLOG)
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

    @property
    def waiting(self) -> int:
        """Connections that have not shown a credential yet."""
        return sum(map(len, self._waiting.values()))

    def expect(self, pod: str, credentials: Credentials, arrived: Callable[[Stream], None]) -> None:
        """Admit `pod` by `credentials` from now on, again and again (a broken connection is dialled anew).

        One that was kept for it by `keep` arrives at once.
        """
        self._over.discard(pod)
        before, kept = self._expected.get(pod), self._kept.pop(pod, None)
        self._expected[pod] = (credentials, arrived)
        if kept is None:
            return
        if before is not None and credentials.continues(before[0]):
            arrived(kept)
        else:  # of a predecessor of the same name
            kept[1].transport.abort()

    def keep(self, pod: str, credentials: Credentials) -> None:
        """Admit `pod`, which somebody will `expect` later, and hold its newest connection until then."""

        def arrived(stream: Stream) -> None:
            if pod in self._kept:
                self._kept[pod][1].transport.abort()
            self._kept[pod] = stream

        if pod not in self._expected:
            self.expect(pod, credentials, arrived)

    def forget(self, pod: str) -> None:
        """Refuse `pod` from now on: its attempt is over, whatever still runs of it."""
        self._expected.pop(pod, None)
        self._over.add(pod)
        if (kept := self._kept.pop(pod, None)) is not None:
            kept[1].transport.abort()

    def settle(self) -> None:
        """No stranger can be ours any more."""
        self._settled_at = 0.0

    async def close(self) -> None:
        """Stop listening. Streams that were handed over are their takers'."""
        self._expected.clear()
        self._ended = True
        server, self._server = self._server, None
        if server is not None:
            await stop_accepting(server)
        for _, writer in self._kept.values():
            writer.transport.abort()
        self._kept.clear()
        waiting = [one for group in self._waiting.values() for one in group.items()]
        for task, writer in waiting:
            task.cancel()
            writer.transport.abort()
        if waiting:
            await asyncio.wait([task for task, _ in waiting])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ended:  # taken just before the end
            writer.transport.abort()
            return
        name: object = writer.get_extra_info("peername")
        address = str(name[0]) if isinstance(name, tuple) else ""
        if len(self._waiting.get(address, ())) >= self._most // _SHARE:
            self._drop_oldest(address)
        elif self.waiting >= self._most:
            self._drop_oldest(max(self._waiting, key=lambda one: len(self._waiting[one])))
        task = asyncio.create_task(self._greet(reader, writer))
        self._waiting.setdefault(address, {})[task] = writer
        task.add_done_callback(lambda task: self._leave(address, task))

    def _drop_oldest(self, address: str) -> None:
        task, writer = next(iter(self._waiting[address].items()))
        self._leave(address, task)
        task.cancel()
        writer.transport.abort()
        self.dropped += 1

    def _leave(self, address: str, task: asyncio.Task[None]) -> None:
        group = self._waiting.get(address, {})
        group.pop(task, None)
        if not group:
            self._waiting.pop(address, None)

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
        return found[1] if found[0].admits(token) else None


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
