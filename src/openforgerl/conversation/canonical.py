"""Canonical equality over conversations.

Inside tool arguments and schemas: objects are unordered, numbers are IEEE doubles, bool is not a number,
nothing is ignored. Outside them: null, absent and [] are one; a string is one text block; an empty text
block is no block; call ids compare without their non-alphanumeric characters (one harness strips those).
No trimming and no Unicode normalisation anywhere. Arguments that are not JSON compare by their bytes.

A digest is the sha256 hex of the canonical bytes, so equal digests mean canonically equal.
"""

from __future__ import annotations

import hashlib
import math
import re

import msgspec

from openforgerl.types.messages import (
    Image,
    JsonValue,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolSpec,
)

_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]")

MOST_NESTED = 128
"""Levels of lists and objects in a JSON value that we take. Everything that walks values recurses, and a value
that one walk survives and the next does not would be recorded and never read again."""


def plain_call_id(call_id: str) -> str:
    """A tool-call id without its non-alphanumeric characters: how ids are compared."""
    return _NOT_ALPHANUMERIC.sub("", call_id)


def parse_arguments(arguments: str) -> JsonValue | None:
    """The JSON value of a tool call's arguments, or None when the text is not one strict JSON value.

    A literal `null` also gives None: neither can be handed to a tool as an object. So does a value of more than
    `MOST_NESTED` levels, which a policy writes when it repeats itself.
    """
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return None if nested_too_deeply(value) else value


def nested_too_deeply(value: JsonValue) -> bool:
    """Whether lists and objects lie in one another more than `MOST_NESTED` levels deep."""
    level = [value]
    for _ in range(MOST_NESTED):
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def canonical_json(value: JsonValue) -> JsonValue:
    """`value` with every number as a double, so that sorted-key encoding is canonical.

    A number beyond the doubles becomes a marker object; key strings stay as they are.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if value > 0 else -math.inf
        if math.isfinite(number):
            return number + 0.0  # -0.0 and 0.0 are equal doubles
        return {"\x00number": repr(number)}
    if isinstance(value, list | tuple):
        return [canonical_json(item) for item in value]
    if isinstance(value, dict):
        return {key: canonical_json(item) for key, item in value.items()}
    raise TypeError(f"not a JSON value: {type(value).__name__}")


def digest_json(value: JsonValue) -> str:
    """sha256 hex of the canonical encoding of a JSON value."""
    return _digest(canonical_json(value))


def digest_message(message: Message) -> str:
    """Digest of everything canonical in a message, reasoning included."""
    return _digest(_message_form(message, reasoning=True))


def digest_outline(message: Message) -> str:
    """Digest without reasoning: finds the thread of a harness that drops thoughts from its history."""
    return _digest(_message_form(message, reasoning=False))


def digest_tools(tools: tuple[ToolSpec, ...]) -> str:
    """Digest of a tool list; the order of tools counts, because templates print them in order."""
    return _digest([_tool_form(tool) for tool in tools])


def same_message(left: Message, right: Message) -> bool:
    """Canonical equality of two messages."""
    return left == right or digest_message(left) == digest_message(right)


def same_tools(left: tuple[ToolSpec, ...], right: tuple[ToolSpec, ...]) -> bool:
    """Canonical equality of two tool lists."""
    return left == right or digest_tools(left) == digest_tools(right)


def _digest(form: JsonValue) -> str:
    return hashlib.sha256(msgspec.json.encode(form, order="deterministic")).hexdigest()


def _message_form(message: Message, *, reasoning: bool) -> JsonValue:
    form: dict[str, JsonValue] = {
        "role": message.role.value,
        "parts": [
            form
            for part in message.parts
            if (reasoning or not isinstance(part, Reasoning))
            for form in [_part_form(part)]
            if form
        ],
    }
    if message.tool_calls:
        form["calls"] = [_call_form(call) for call in message.tool_calls]
    if message.role is Role.TOOL:
        form["answers"] = plain_call_id(message.tool_call_id or "")
        form["error"] = message.is_error
    if message.name:
        form["name"] = message.name
    return form


def _part_form(part: Part) -> JsonValue:
    if isinstance(part, Text):
        return ["text", part.text] if part.text else None
    if isinstance(part, Image):
        return ["image", part.sha256]
    return ["reasoning", part.text] if part.text else None


def _call_form(call: ToolCall) -> JsonValue:
    form: dict[str, JsonValue] = {
        "id": plain_call_id(call.id),
        "name": call.name,
        "namespace": call.namespace or "",
    }
    parsed = None if call.freeform else parse_arguments(call.arguments)
    if parsed is None:
        form["text"] = call.arguments
    else:
        form["arguments"] = canonical_json(parsed)
    return form


def _tool_form(tool: ToolSpec) -> JsonValue:
    return {
        "name": tool.name,
        "namespace": tool.namespace or "",
        "description": tool.description,
        "parameters": canonical_json(tool.parameters),
        "grammar": canonical_json(tool.grammar),
    }
