"""The dialects of real harnesses, sans-IO: bytes to requests, answers to bytes. One file a dialect, plus sse."""

from collections.abc import Callable

from openforgerl.wire.assembly import MessageBuilder, StopStrings
from openforgerl.wire.chat import ChatDialect
from openforgerl.wire.dialect import (
    Address,
    Answer,
    Dialect,
    ForcedCall,
    Head,
    Memory,
    NoMemory,
    Request,
    ShownToken,
    StreamWriter,
    TokenWriter,
)
from openforgerl.wire.fields import CHAT, Disposition, Field, FieldTable
from openforgerl.wire.gemini import GeminiDialect
from openforgerl.wire.gemini_fields import GEMINI
from openforgerl.wire.messages import MessagesDialect
from openforgerl.wire.messages_fields import MESSAGES
from openforgerl.wire.responses import ResponsesDialect
from openforgerl.wire.responses_fields import RESPONSES
from openforgerl.wire.sse import SseEvent, SseReader, comment, encode_event

DIALECTS: tuple[Callable[[], Dialect], ...] = (ChatDialect, ResponsesDialect, MessagesDialect, GeminiDialect)
"""Every dialect that the proxy serves."""

__all__ = [
    "CHAT",
    "DIALECTS",
    "GEMINI",
    "MESSAGES",
    "RESPONSES",
    "Address",
    "Answer",
    "ChatDialect",
    "Dialect",
    "Disposition",
    "Field",
    "FieldTable",
    "ForcedCall",
    "GeminiDialect",
    "Head",
    "Memory",
    "MessageBuilder",
    "MessagesDialect",
    "NoMemory",
    "Request",
    "ResponsesDialect",
    "ShownToken",
    "SseEvent",
    "SseReader",
    "StopStrings",
    "StreamWriter",
    "TokenWriter",
    "comment",
    "encode_event",
]
