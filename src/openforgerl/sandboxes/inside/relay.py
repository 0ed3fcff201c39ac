"""Bytes between 127.0.0.1 inside and the proxy's address, where no listener can be handed to the host.

Runs within init's poll loop: nothing here blocks.
"""

from __future__ import annotations

import contextlib
import select
import socket

MOST_BUFFER = 1 << 18
MOST_PAIRS = 128


class Flow:
    """One direction of a connection."""

    __slots__ = ("buffer", "ended", "shut", "source", "target")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.buffer = bytearray()
        self.ended = False
        self.shut = False

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.source.recv(65536)
            self.buffer += data
            self.ended = not data

    def write(self) -> None:
        if self.buffer:
            with contextlib.suppress(BlockingIOError):
                del self.buffer[: self.target.send(self.buffer)]
        if self.ended and not self.buffer and not self.shut:
            self.target.shutdown(socket.SHUT_WR)
            self.shut = True


class Pair:
    """A client inside and its connection to the proxy."""

    def __init__(self, client: socket.socket, upstream: socket.socket) -> None:
        self.client = client
        self.upstream = upstream
        self.connecting = True
        self.flows = (Flow(client, upstream), Flow(upstream, client))

    def wanted(self) -> dict[int, int]:
        """Descriptor → the poll events that would let something go on."""
        if self.connecting:
            return {self.upstream.fileno(): select.POLLOUT}
        events = {self.client.fileno(): 0, self.upstream.fileno(): 0}
        for flow in self.flows:
            if not flow.ended and len(flow.buffer) < MOST_BUFFER:
                events[flow.source.fileno()] |= select.POLLIN
            if flow.buffer:
                events[flow.target.fileno()] |= select.POLLOUT
        return events

    def turn(self) -> bool:
        """Move what can be moved; False when nothing more will come."""
        try:
            if self.connecting:
                error = self.upstream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "connect")
                self.connecting = False
            for flow in self.flows:
                if not flow.ended and len(flow.buffer) < MOST_BUFFER:
                    flow.read()
                flow.write()
        except OSError:
            return False
        return not all(flow.shut for flow in self.flows)

    def close(self) -> None:
        self.client.close()
        self.upstream.close()


class Relay:
    """The listening socket and its connections, as descriptors of somebody's poll object."""

    def __init__(self, listener: socket.socket, upstream: tuple[str, int], poll: select.poll) -> None:
        self.listener = listener
        self.upstream = upstream
        self.poll = poll
        self.pairs: dict[int, Pair] = {}
        listener.setblocking(False)
        poll.register(listener.fileno(), select.POLLIN)

    def takes(self, fd: int) -> bool:
        """Whether `fd` is one of ours; if so, what it is ready for has been done."""
        if fd == self.listener.fileno():
            self.accept()
            return True
        pair = self.pairs.get(fd)
        if pair is None:
            return False
        if pair.turn():
            self.watch(pair)
        else:
            self.end(pair)
        return True

    def accept(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return  # it left again
        if len(self.pairs) >= 2 * MOST_PAIRS:
            client.close()
            return
        try:
            host, port = self.upstream
            family, kind, protocol, _, address = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0]
            upstream = socket.socket(family, kind, protocol)
        except OSError:
            client.close()
            return
        client.setblocking(False)
        upstream.setblocking(False)
        pair = Pair(client, upstream)
        try:
            with contextlib.suppress(BlockingIOError):
                upstream.connect(address)
        except OSError:
            pair.close()
            return
        for end in (client, upstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pairs[end.fileno()] = pair
        self.watch(pair)

    def watch(self, pair: Pair) -> None:
        wanted = pair.wanted()
        for end in (pair.client, pair.upstream):
            events = wanted.get(end.fileno(), 0)
            if events:
                self.poll.register(end.fileno(), events)
            else:  # polled for nothing, a connection that has hung up would still wake us without end
                self.forget(end.fileno())

    def end(self, pair: Pair) -> None:
        for end in (pair.client, pair.upstream):
            self.forget(end.fileno())
            del self.pairs[end.fileno()]
        pair.close()

    def forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self.poll.unregister(fd)
