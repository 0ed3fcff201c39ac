"""What the relay needs to know of an upstream's API. Bodies out, events in, no I/O."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from openforgerl.engines.relay_faults import malformed
from openforgerl.errors import EngineError
from openforgerl.rendering.answers import tool_call_id
from openforgerl.types import Image, JsonValue, MessageDelta, Question, Sampling, TextChunk, ToolSpec
from openforgerl.wire import SseEvent


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """One question on its way."""

    question: Question
    sampling: Sampling
    affinity: str
    """The session's id."""
    seed: str
    """Makes the ids of tool calls."""
    model: str
    """The upstream's name of the model."""
    limit: int
    """Our context length, for the wording of an overflow."""


class AnswerReader(Protocol):
    """Reads one answer's events."""

    def feed(self, event: SseEvent) -> Sequence[MessageDelta]:
        """The pieces in it. Raises Fault."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the end mark was read."""
        ...

    def close(self) -> TextChunk:
        """What was held back, finish reason, usage and warnings. Raises Fault when the answer is not whole."""
        ...


class UpstreamApi(Protocol):
    """One API that upstreams speak."""

    @property
    def path(self) -> str:
        """Behind the base URL."""
        ...

    def headers(self, key: str) -> dict[str, str]:
        """Those that carry the key ("" = none) and the API's version."""
        ...

    def body(self, asking: Asking) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
        """The request body, and what could not be said in this API. EngineError where that would change the answer."""
        ...

    def reader(self, asking: Asking) -> AnswerReader: ...


class Calls:
    """The tool calls of an answer as they open, one after another, under ids of ours.

    Ids of ours, because upstreams repeat theirs between answers; a client echoes them, and the upstream sees the
    same ones in calls and results.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self.count = 0

    def open(self, name: JsonValue) -> MessageDelta:
        """The next call."""
        if not isinstance(name, str) or not name:
            raise malformed("a tool call has no name")
        self.count += 1
        return MessageDelta(kind="call", text=name, call_index=self.count - 1, call_id=self.id(self.count - 1))

    def more(self, arguments: str) -> list[MessageDelta]:
        """More of the last call's arguments."""
        if not arguments:
            return []
        at = self.count - 1
        return [MessageDelta(kind="arguments", text=arguments, call_index=at, call_id=self.id(at))]

    def id(self, index: int) -> str:
        """Our id of that call."""
        return tool_call_id(self._seed, index)


def tool_function(tool: ToolSpec) -> tuple[str, str, dict[str, JsonValue]]:
    """Name, description and JSON schema of a tool, as the harness spelled them."""
    empty: dict[str, JsonValue] = {"type": "object", "properties": {}}
    given = tool.raw.get("function") if tool.raw is not None else None
    if not isinstance(given, dict):
        return tool.name, tool.description, tool.parameters or empty
    parameters = given.get("parameters")
    return (
        str(given.get("name") or tool.name),
        str(given.get("description") or ""),
        parameters if isinstance(parameters, dict) and parameters else empty,
    )


def base64_of(image: Image, images: Mapping[str, bytes]) -> str:
    """An image's bytes as text. EngineError when the request did not bring them."""
    data = images.get(image.sha256)
    if data is None:
        raise EngineError(f"the bytes of image {image.sha256[:12]} are not at hand, so it cannot be relayed")
    return base64.b64encode(data).decode()


def text_of(value: JsonValue, what: str) -> str:
    """A string, or nothing for null. Fault for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed(f"{what} is no string")
    return value


def count_of(value: JsonValue) -> int:
    """A token count; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def mapping_of(value: JsonValue, what: str) -> dict[str, JsonValue]:
    """An object, empty for null. Fault for anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed(f"{what} is no object")
    return value
