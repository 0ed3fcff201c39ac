"""OpenAI Responses, both ways (API reference: "Create a model response", "Streaming events")."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Conversation, JsonValue, Message, Role, Text
from openforgerl.wire import reading
from openforgerl.wire.chat_answers import models_body
from openforgerl.wire.dialect import (
    BODY_ALONE,
    NOTHING_YET,
    Address,
    Answer,
    Head,
    Memory,
    Request,
    StreamWriter,
)
from openforgerl.wire.notes import Notes
from openforgerl.wire.opening import joined_system
from openforgerl.wire.reading import bad, present
from openforgerl.wire.responses_answers import ended, http_error, output_items, response_object
from openforgerl.wire.responses_calls import RESPONSE_PREFIX, sent_call
from openforgerl.wire.responses_fields import RESPONSES
from openforgerl.wire.responses_input import InputReader
from openforgerl.wire.responses_stream import ResponsesStream
from openforgerl.wire.responses_tools import choose, known_tools, offered

_INSTRUCTIONS = "instructions"
"""The original role of a system message whose first part is `instructions`."""


class ResponsesDialect:
    """The dialect `responses`."""

    name = "responses"
    cut_after_failure = True

    def parse(
        self, body: bytes, *, strict: bool = False, address: Address = BODY_ALONE, memory: Memory = NOTHING_YET
    ) -> Request:
        """The request in `body`. Raises WireError 400 naming the field and what is accepted."""
        raw, warnings = reading.decode_object(body, memory.rereading)
        notes = Notes(strict=strict, warnings=warnings)
        RESPONSES.check(raw, notes)
        tools, forced = choose(raw.get("tool_choice"), offered(raw, notes))
        reader = InputReader(memory, notes)
        messages = _messages(raw, reader, memory)
        _check_text(raw.get("text"), notes)
        most = raw.get("max_output_tokens")
        return Request(
            dialect=self.name,
            model=reading.text(raw["model"], "model") if present(raw, "model") else "",
            conversation=Conversation(messages=messages, tools=tuple(tools)),
            stream=reading.flag(raw["stream"], "stream") if present(raw, "stream") else False,
            include_usage=True,
            max_tokens=None if most is None else reading.count(most, "max_output_tokens"),
            forced=forced,
            images=notes.images,
            asked=_asked(raw),
            raw=raw,
            unlisted=notes.unlisted,
            warnings=notes.warnings,
        )

    def sent(self, message: Message, request: Request) -> Message:
        """The message with its calls as their echo will say them (`responses_calls`)."""
        if not message.tool_calls:
            return message
        tools = known_tools(request)
        return msgspec.structs.replace(message, tool_calls=tuple(sent_call(call, tools) for call in message.tool_calls))

    def writer(self, head: Head, request: Request) -> StreamWriter:
        """A writer of `response.*` events."""
        return ResponsesStream(head, request, known_tools(request))

    def whole(self, head: Head, request: Request, answer: Answer) -> dict[str, JsonValue]:
        """A `response` object."""
        output = output_items(head, answer, known_tools(request))
        return response_object(head, request, ended(answer), output, answer)

    def counted(self, tokens: int) -> dict[str, JsonValue]:
        """The answer of `/v1/responses/input_tokens`."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def status(self, error: WireError) -> int:
        """The error's own."""
        return error.status

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """OpenAI's error object."""
        return http_error(error)

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The answer of `/v1/models`."""
        return models_body(names)


def _asked(raw: dict[str, JsonValue]) -> dict[str, JsonValue]:
    asked = reading.numbers(raw, reading.SAMPLING)
    if present(raw, "max_output_tokens"):
        asked["max_output_tokens"] = raw["max_output_tokens"]
    return asked


def _check_text(value: JsonValue, notes: Notes) -> None:
    if value is None:
        return
    text = reading.mapping(value, "text")
    notes.check(text, ("format", "verbosity"), "text", "text")
    if not present(text, "format"):
        return
    kind = reading.mapping(text["format"], "text.format").get("type")
    if kind != "text":
        raise WireError(
            400,
            "unsupported_field",
            "text.format: only `text` is supported: answers are sampled freely, without a grammar; ask for the format "
            "in the prompt",
            param="text.format",
        )


def _messages(raw: dict[str, JsonValue], reader: InputReader, memory: Memory) -> tuple[Message, ...]:
    """Instructions, the earlier conversation where one is named, and the input."""
    messages = _earlier(raw, memory)
    if present(raw, "input"):
        messages += reader.read(raw["input"])
    elif not messages:
        raise bad("input", "is required: a string or a list of items")
    if present(raw, "instructions"):
        text = reading.text(raw["instructions"], "instructions")
        if text:
            messages.insert(0, Message(role=Role.SYSTEM, parts=(Text(text),), original_role=_INSTRUCTIONS))
    if not messages:
        raise bad("input", "must hold at least one message")
    return tuple(joined_system(messages))


def _earlier(raw: dict[str, JsonValue], memory: Memory) -> list[Message]:
    """The conversation of `previous_response_id` with its answer, without its instructions, which are not kept."""
    if not present(raw, "previous_response_id"):
        return []
    name = "previous_response_id"
    given = reading.text(raw[name], name)
    found = memory.answered(given.removeprefix(RESPONSE_PREFIX)) if given.startswith(RESPONSE_PREFIX) else None
    if found is None:
        raise WireError(
            400,
            "previous_response_not_found",
            f"{name}: no response {given[:80]!r} in this session; send the whole conversation as `input`",
            param=name,
        )
    first, *rest = found.messages
    if first.role is not Role.SYSTEM or first.original_role != _INSTRUCTIONS:
        return [first, *rest]
    kept = first.parts[2:]  # the instructions, and what joined them to the next
    return [msgspec.structs.replace(first, parts=kept, original_role=None), *rest] if kept else rest
