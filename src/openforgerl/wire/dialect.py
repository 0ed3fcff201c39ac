"""What every dialect turns its requests into and its answers from. Bytes in, bytes out, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Conversation, FinishReason, ForcedCall, JsonValue, Message, MessageDelta, Reasoning
from openforgerl.wire.rereading import Rereading


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What the URL and headers say beside the body. Gemini names the model and the streaming there."""

    model: str = ""
    stream: bool | None = None
    """None: the body says."""


BODY_ALONE = Address()
"""The address of dialects whose body says everything."""


class Memory(Protocol):
    """What a session remembers of its own answers, for dialects whose requests point back at them."""

    def reasoning(self, handle: str) -> Reasoning | None:
        """The thought that this opaque handle of ours was given out for (with the handle), or None."""
        ...

    def answered(self, call_id: str) -> Conversation | None:
        """The conversation of an earlier complete call with its answer as the last message, or None."""
        ...

    @property
    def rereading(self) -> Rereading:
        """What its earlier requests held."""
        ...


class NoMemory:
    """The memory of a session's first request."""

    def reasoning(self, handle: str) -> Reasoning | None:
        """Nothing."""
        return None

    def answered(self, call_id: str) -> Conversation | None:
        """Nothing."""
        return None

    @property
    def rereading(self) -> Rereading:
        """Nothing, and what it is told is forgotten."""
        return Rereading()


NOTHING_YET = NoMemory()


class ShownToken(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token as a client may be shown it."""

    data: bytes
    """UTF-8, maybe part of a character."""
    logprob: float


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
    forced: ForcedCall | None = None
    """The tool call that the answer must open with, or None."""
    images: Mapping[str, bytes] = {}
    """The bytes of every image that the conversation names by sha256."""
    logprobs: bool = False
    """Whether the client wants to see the sampled tokens with their log-probabilities."""
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
    handle: str = ""
    """What opaque fields (signature, encrypted_content, thoughtSignature) carry for this answer's thought: random,
    known to this session only. On echo `Memory.reasoning` brings the thought back."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer."""

    message: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Sampled ids, stop token and stop string included."""
    stop_string: str | None = None
    """The stop string that ended it, when `finish` is STOP_STRING."""
    tokens: tuple[ShownToken, ...] | None = None
    """Every sampled token but the end of the turn, when the request asked and the engine knows."""


class StreamWriter(Protocol):
    """Writes one answer as a stream; every method returns the bytes to send."""

    def open(self, prompt_tokens: int) -> bytes:
        """What precedes the first delta. Some dialects tell the size of the prompt here."""
        ...

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """The deltas, or nothing when there are none."""
        ...

    def close(self, answer: Answer) -> bytes:
        """Finish reason, usage when asked for, and the end mark."""
        ...

    def keep_alive(self) -> bytes:
        """What may be sent while the model is silent; valid before `open` too, and changes nothing."""
        ...

    def fail(self, error: WireError) -> bytes:
        """The in-stream error; no end mark may follow it."""
        ...


@runtime_checkable
class TokenWriter(Protocol):
    """A stream writer that can show tokens."""

    def show(self, tokens: Sequence[ShownToken]) -> None:
        """The tokens that made the deltas written next."""
        ...


class Dialect(Protocol):
    """One wire protocol."""

    @property
    def name(self) -> str: ...

    @property
    def cut_after_failure(self) -> bool:
        """Whether a stream that failed is cut behind the error, so that nobody takes it for a short answer; False
        where the error alone already makes it one that cannot be read to its end."""
        ...

    def parse(
        self, body: bytes, *, strict: bool = False, address: Address = BODY_ALONE, memory: Memory = NOTHING_YET
    ) -> Request:
        """The request in `body`. Raises WireError naming the field."""
        ...

    def sent(self, message: Message, request: Request) -> Message:
        """`message` as an honest client will echo it: what this dialect can carry of it. Recorded as the answer.

        Most of the time the message itself; another one where the dialect changes it by a documented rule.
        """
        ...

    def writer(self, head: Head, request: Request) -> StreamWriter: ...

    def whole(self, head: Head, request: Request, answer: Answer) -> dict[str, JsonValue]:
        """The answer as one JSON body."""
        ...

    def counted(self, tokens: int) -> dict[str, JsonValue]:
        """The answer to a question for the size of a prompt, where the dialect has one."""
        ...

    def status(self, error: WireError) -> int:
        """The HTTP status of an error: `error.status`, or this dialect's own (Anthropic: 529 when overloaded)."""
        ...

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """The error as one JSON body."""
        ...

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The body that lists the served models; the one list in it holds one entry for each."""
        ...
