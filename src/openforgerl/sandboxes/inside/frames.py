"""The control socket seen from inside: a frame is `>II` (header bytes, payload bytes), a JSON header, a payload."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

FRAME = struct.Struct(">II")
MOST_HEADER = 4 << 20
MOST_PAYLOAD = 32 << 20
CHUNK = 1 << 18

Header = dict[str, Any]


class Refused(Exception):
    """A command that cannot be carried out; `kind` is `input` (a bad path, a wrong type) or `limit`."""

    def __init__(self, message: str, kind: str = "input") -> None:
        super().__init__(message)
        self.kind = kind


class Control:
    """The framed socket to the host. Every loss of it is an EOFError."""

    def __init__(self, end: socket.socket, patience: float | None = None) -> None:
        """`patience`: seconds after which a host that takes no bytes counts as lost."""
        self.socket = end
        self.socket.settimeout(patience)
        os.set_inheritable(end.fileno(), False)
        self.buffer = bytearray()

    def send(self, header: Header, payload: bytes | bytearray | memoryview = b"") -> None:
        text = json.dumps(header).encode()
        try:
            self.socket.sendall(FRAME.pack(len(text), len(payload)) + text)
            if payload:
                self.socket.sendall(payload)
        except OSError as error:
            raise EOFError from error

    def send_listener(self, listener: socket.socket) -> None:
        """The hello where host and sandbox share a kernel: one byte and the listening socket."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))
        self.socket.sendmsg([b"!"], [rights])

    def receive(self) -> list[tuple[Header, bytes]]:
        """Whole frames that have arrived."""
        try:
            data = self.socket.recv(CHUNK)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self.frames(data)

    def frames(self, data: bytes) -> list[tuple[Header, bytes]]:
        """What `data` completes."""
        self.buffer += data
        found: list[tuple[Header, bytes]] = []
        while len(self.buffer) >= FRAME.size:
            head, body = FRAME.unpack_from(self.buffer)
            if head > MOST_HEADER or body > MOST_PAYLOAD:
                raise EOFError
            end = FRAME.size + head + body
            if len(self.buffer) < end:
                break
            text = bytes(self.buffer[FRAME.size : FRAME.size + head])
            found.append((json.loads(text), bytes(self.buffer[FRAME.size + head : end])))
            del self.buffer[:end]
        return found
