"""Server-sent events as bytes (WHATWG HTML, "Server-sent events"), both ways and without any I/O.

Framing is found on bytes, never on decoded text: a UTF-8 character may be cut anywhere between two reads.
"""

from __future__ import annotations

import re

import msgspec

_LINE_END = re.compile(rb"\r\n|\n|\r")

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Default bound of one incoming event; a peer that never ends a line must not fill memory."""


class SseEvent(msgspec.Struct, frozen=True):
    """One event: its `data` lines joined by newlines, and its name when it has one."""

    data: str
    event: str | None = None


def encode_event(data: bytes, event: str | None = None) -> bytes:
    """One event as sent. `data` is UTF-8 and may hold newlines; `event` is a name without them."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


def comment(text: str) -> bytes:
    """A comment that every client skips: keeps a silent connection alive."""
    return b": " + text.encode() + b"\n\n"


class SseReader:
    """Reads events from bytes cut anywhere. `feed` gives the events completed so far."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        self._scanned = 0
        self._data: list[bytes] = []
        self._held = 0
        self._event: str | None = None
        self._started = False

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Events that `piece` completes. ValueError when an event outgrows the bound or is not UTF-8."""
        self._buffer += piece
        events: list[SseEvent] = []
        while (line := self._line()) is not None:
            event = self._take(line)
            if event is not None:
                events.append(event)
        if len(self._buffer) + self._held > self._max:
            raise ValueError(f"an event is larger than {self._max} bytes")
        return events

    def _line(self) -> bytes | None:
        """The next whole line. A line ends in LF, CR LF or CR; a CR at the very end may still become CR LF."""
        found = _LINE_END.search(self._buffer, self._scanned)
        if found is None or (found.group() == b"\r" and found.end() == len(self._buffer)):
            self._scanned = max(0, len(self._buffer) - 1)
            return None
        line = bytes(self._buffer[: found.start()])
        end = found.end()
        del found  # a match keeps the bytearray from being resized
        del self._buffer[:end]
        self._scanned = 0
        return line

    def _take(self, line: bytes) -> SseEvent | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._held += len(value) + 1
        elif name == b"event":
            self._event = value.decode()
        return None

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._held = [], None, 0
        return SseEvent(b"\n".join(data).decode(), event) if data else None
