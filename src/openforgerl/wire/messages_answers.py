"""What goes back to a client of the Messages dialect: events, whole messages, errors and the list of models.

A tool call's input must be an object on this wire. In a stream its pieces go out as the policy wrote them, whatever
they are. Where an object is needed (a whole message, and the client's echo of either), see `input_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.errors import ContextOverflow, ExactnessError, WireError
from openforgerl.types import FinishReason, JsonValue, Message, MessageDelta
from openforgerl.wire.dialect import Answer, Head
from openforgerl.wire.sse import comment, encode_event

UNPARSED = "__unparsedToolInput"
"""The key under which claude-code keeps a streamed input that is no JSON; its tools refuse it and say so."""

OVERLOADED = 529
"""Anthropic's status for "overloaded, try again"."""

_WHITE = " \t\n\r"
"""White space of JSON."""


def input_of(arguments: str) -> dict[str, JsonValue]:
    """A tool call's arguments as the object that this wire asks for.

    Nothing and `null` are the empty object. What is no JSON object stays whole under `UNPARSED`, as claude-code
    echoes it: no tool takes that for a real call, while an empty object might be one.
    """
    if arguments.strip(_WHITE) in ("", "null"):
        return {}
    value = parse_arguments(arguments)
    if isinstance(value, dict):
        return value
    units = len(arguments.encode("utf-16-le", "surrogatepass")) // 2  # a JavaScript client counts so
    return {UNPARSED: {"raw": arguments, "len": units}}


def echoed(message: Message) -> Message:
    """`message` with every call's arguments an object, as they come back from a client."""
    calls = tuple(
        call
        if isinstance(parse_arguments(call.arguments), dict)
        else msgspec.structs.replace(call, arguments=msgspec.json.encode(input_of(call.arguments)).decode())
        for call in message.tool_calls
    )
    return message if calls == message.tool_calls else msgspec.structs.replace(message, tool_calls=calls)


class MessagesStream:
    """Events in the order that clients rely on: start, each block opened, filled and closed, the end and its reason."""

    def __init__(self, head: Head, *, show_thoughts: bool) -> None:
        self._head = head
        self._show_thoughts = show_thoughts
        self._opened = False
        self._kind: str | None = None
        """Kind of the open block, or None."""
        self._index = -1
        """Of the last block that was opened."""
        self._call = -1
        self._held: str | None = None
        """All arguments of the open call, while they may still turn out to be nothing or `null`."""

    def open(self, prompt_tokens: int) -> bytes:
        """`message_start`, with the size of the prompt."""
        self._opened = True
        message = {**_frame(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(prompt_tokens, 0)})

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """The deltas, with the blocks that they open and close."""
        return b"".join(self._write(delta) for delta in deltas)

    def close(self, answer: Answer) -> bytes:
        """The end of the last block, `message_delta` with stop reason and usage, `message_stop`."""
        ended = {"stop_reason": stop_reason(answer), "stop_sequence": _stop_sequence(answer)}
        usage = _usage(answer.prompt_tokens, answer.completion_tokens)
        return self._stop_block() + _event("message_delta", delta=ended, usage=usage) + _event("message_stop")

    def keep_alive(self) -> bytes:
        """A `ping`; before `message_start`, which some clients expect first, a comment, which all skip."""
        return _event("ping") if self._opened else comment("keep-alive")

    def fail(self, error: WireError) -> bytes:
        """The error as an event. No `message_stop` follows: a client must not take the stream for a whole answer."""
        return encode_event(msgspec.json.encode(error_body(error)), "error")

    def _write(self, delta: MessageDelta) -> bytes:
        if delta.kind == "call":
            block = {"type": "tool_use", "id": delta.call_id, "name": delta.text, "input": {}}
            started = self._stop_block() + self._start_block(block)
            self._call, self._held = delta.call_index, ""
            return started
        if delta.kind == "arguments":
            return self._arguments(delta)
        if not delta.text:
            return b""
        if delta.kind == "text":
            opening = self._inside({"type": "text", "text": ""})
            return opening + self._delta({"type": "text_delta", "text": delta.text})
        opening = self._inside({"type": "thinking", "thinking": "", "signature": ""})
        return opening + (
            self._delta({"type": "thinking_delta", "thinking": delta.text}) if self._show_thoughts else b""
        )

    def _arguments(self, delta: MessageDelta) -> bytes:
        if self._kind != "tool_use" or delta.call_index != self._call:
            raise ExactnessError(f"arguments of tool call {delta.call_index} came after its block was closed")
        text = delta.text
        if self._held is not None:
            text = self._held + text
            self._held = text if "null".startswith(text.strip(_WHITE)) else None
        if self._held is not None or not text:
            return b""
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _inside(self, block: dict[str, JsonValue]) -> bytes:
        """What opens `block`, unless one of its kind is open."""
        return b"" if self._kind == block["type"] else self._stop_block() + self._start_block(block)

    def _start_block(self, block: dict[str, JsonValue]) -> bytes:
        self._kind = block["type"]
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _stop_block(self) -> bytes:
        if self._kind is None:
            return b""
        last = b""
        if self._kind == "thinking":
            last = self._delta({"type": "signature_delta", "signature": self._head.handle})
        elif self._held is not None and self._held.strip(_WHITE) not in ("", "null"):
            last = self._delta({"type": "input_json_delta", "partial_json": self._held})
        self._kind, self._held = None, None
        return last + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, JsonValue]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: JsonValue) -> bytes:
    return encode_event(msgspec.json.encode({"type": kind, **fields}), kind)


def _frame(head: Head) -> dict[str, JsonValue]:
    return {"id": f"msg_{head.call_id}", "type": "message", "role": "assistant", "model": head.model}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, JsonValue]:
    """Token counts; every sampled id counts, also those behind a stop string. No cache is billed."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }


def stop_reason(answer: Answer) -> str:
    """Anthropic's word for how an answer ended."""
    if answer.finish is FinishReason.LENGTH:
        return "max_tokens"
    if answer.finish is FinishReason.STOP_STRING:
        return "stop_sequence"
    return "tool_use" if answer.message.tool_calls else "end_turn"


def _stop_sequence(answer: Answer) -> str | None:
    return answer.stop_string if answer.finish is FinishReason.STOP_STRING else None


def whole_body(head: Head, answer: Answer, *, show_thoughts: bool) -> dict[str, JsonValue]:
    """A `message` object."""
    message = answer.message
    content: list[dict[str, JsonValue]] = []
    if message.reasoning:
        thinking = message.reasoning if show_thoughts else ""
        content.append({"type": "thinking", "thinking": thinking, "signature": head.handle})
    if message.text:
        content.append({"type": "text", "text": message.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)}
        for call in message.tool_calls
    ]
    return {
        **_frame(head),
        "content": content,
        "stop_reason": stop_reason(answer),
        "stop_sequence": _stop_sequence(answer),
        "usage": _usage(answer.prompt_tokens, answer.completion_tokens),
    }


def error_body(error: WireError) -> dict[str, JsonValue]:
    """Anthropic's error object, with our stable `code` beside its own fields.

    An overflow has the words that clients of this API look for before they compact.
    """
    message = error.message
    if isinstance(error, ContextOverflow):
        # At least one token must follow the prompt, so a prompt that just fits is one too long.
        needed = max(error.prompt_tokens, error.limit + 1)
        message = f"prompt is too long: {needed} tokens > {error.limit} maximum"
    return {
        "type": "error",
        "error": {"type": _error_type(error.status), "message": message, "code": error.code},
        "request_id": None,
    }


def _error_type(status: int) -> str:
    named = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        OVERLOADED: "overloaded_error",
    }
    return named.get(status, "api_error" if status >= 500 else "invalid_request_error")


def models_body(names: Sequence[str]) -> dict[str, JsonValue]:
    """One page of models; when they were made is not known, which this API writes as the epoch."""
    return {
        "data": [
            {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"} for name in names
        ],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
