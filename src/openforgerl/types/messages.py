"""The one canonical conversation form. What a harness says in any dialect becomes this, and only this.

Equality and digests live in `openforgerl.conversation`; the dialects' spellings live in `wire/`.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

JsonValue = Any
"""A JSON value as `msgspec.json` decodes it: None, bool, int, float, str, list, dict[str, JsonValue]."""


class Role(enum.StrEnum):
    """Who speaks. `developer` is mapped to `system` with the original kept in `Message.original_role`."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Plain text, exactly as received or sampled."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """A thought. `handle` is our own random per-session reference that opaque dialect fields carry."""

    text: str
    handle: str | None = None


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image by content: sha256 hex of its bytes, and its media type (`image/png`)."""

    sha256: str
    media_type: str


Part = Text | Reasoning | Image


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the policy wrote it."""

    id: str
    name: str
    arguments: str
    """The arguments' text as sampled (normally a JSON object; may be unparseable, then compared by bytes)."""
    freeform: bool = False
    """True when the tool takes plain text instead of JSON (Responses `custom` tools)."""
    namespace: str | None = None


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as offered to the model: a JSON schema, or a freeform grammar."""

    name: str
    description: str = ""
    parameters: dict[str, JsonValue] | None = None
    """JSON schema of the arguments; None for freeform tools."""
    grammar: dict[str, JsonValue] | None = None
    """A freeform tool's format description; None for JSON tools."""
    namespace: str | None = None
    raw: dict[str, JsonValue] | None = None
    """The tool exactly as a chat template expects to see it (`{"type": "function", "function": {...}}`), in the
    harness's own key order and with its extra keys, because templates print it; None to build it from the
    fields above."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `parts` in order; `tool_calls` in order (assistant only); `tool_call_id` for tool results."""

    role: Role
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    original_role: str | None = None
    """The role as the harness wrote it when it differs from `role` (`developer`, `function`)."""
    is_error: bool = False
    """A tool result that the harness itself marked as an error."""

    def __post_init__(self) -> None:
        if self.tool_calls and self.role is not Role.ASSISTANT:
            raise ValueError(f"only an assistant message may call tools, not {self.role}")
        if self.tool_call_id is not None and self.role is not Role.TOOL:
            raise ValueError(f"only a tool message answers a tool call, not {self.role}")

    @property
    def text(self) -> str:
        """All text parts joined without a separator (reasoning and images left out)."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """All reasoning parts joined without a separator."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a model call is about: messages in order, the tools on offer, and template arguments."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an assistant message that is certain and will not change.

    `text` and `reasoning`: more characters of that part. `call`: a tool call opens (`text` is its name).
    `arguments`: more characters of call `call_index`'s arguments.
    """

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str
    call_index: int = -1
    """0-based tool call; -1 for text and reasoning."""
    call_id: str = ""
