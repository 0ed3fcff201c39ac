"""What every dialect turns its requests into and its answers from. Bytes in, bytes out, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Conversation, FinishReason, JsonValue, Message, MessageDelta


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as understood."""

    dialect: str
    model: str
    """The name that the client asked for; recorded and echoed, never routed on."""
    conversation: Conversation
    stream: bool = False
    include_usage: bool = False
    """Whether the client asked for usage in a stream; it is always in a whole answer."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    asked: dict[str, JsonValue] = {}
    """The sampling fields as the client wrote them."""
    raw: JsonValue = None
    """The whole body, parsed."""
    unlisted: tuple[str, ...] = ()
    """Paths of fields that the dialect's table does not list."""
    warnings: tuple[str, ...] = ()
    """What was left out or mended, for the record."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every piece of one answer carries."""

    call_id: str
    model: str
    created: int
    """Unix seconds."""
    include_usage: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer."""

    message: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Sampled ids, stop token and stop string included."""


class StreamWriter(Protocol):
    """Writes one answer as a stream; every method returns the bytes to send."""

    def open(self) -> bytes:
        """What precedes the first delta."""
        ...

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """The deltas, or nothing when there are none."""
        ...

    def close(self, answer: Answer) -> bytes:
        """Finish reason, usage when asked for, and the end mark."""
        ...

    def fail(self, error: WireError) -> bytes:
        """The in-stream error; no end mark may follow it."""
        ...


class Dialect(Protocol):
    """One wire protocol."""

    @property
    def name(self) -> str: ...

    def parse(self, body: bytes, *, strict: bool) -> Request:
        """The request in `body`. Raises WireError naming the field."""
        ...

    def writer(self, head: Head) -> StreamWriter: ...

    def whole(self, head: Head, answer: Answer) -> dict[str, JsonValue]:
        """The answer as one JSON body."""
        ...

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """The error as one JSON body."""
        ...

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The body that lists the served models."""
        ...
