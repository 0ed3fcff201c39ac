"""Messages and tools as chat templates expect them, in the shape that the model's own template takes.

Templates differ in what they stand: some need `content` where a message holds only calls, some need arguments as
text, some as an object, some want ids of nine characters, some refuse text beside a thought and a call. What a
template takes is found out by asking it (`probing`), never by a model's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.rendering.template import traced_json
from openforgerl.rendering.traced import TEMPLATE, uniform
from openforgerl.types import Image, JsonValue, Message, Reasoning, Role, Text, ToolCall, ToolSpec

Form = dict[str, JsonValue]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How one template wants its messages. The default is what transformers' `apply_chat_template` passes on."""

    no_content: Literal["absent", "null", "empty"] = "absent"
    """What stands for the content of a message that only holds calls: no key, `null`, or ""."""
    text_arguments: bool = False
    """Whether arguments are passed as their text; otherwise as an object where they are one."""
    only_objects: bool = False
    """Whether arguments that are no object are passed as `{"arguments": text}`, because text is refused."""
    short_ids: bool = False
    """Whether ids of calls are passed as nine letters and digits, because longer ones are refused."""
    one_thought: bool = False
    """Whether text beside reasoning and calls is passed as the end of the reasoning, because both are refused."""
    move_images: bool = False
    """Whether images in tool results follow them in a user message, because the template shows them only there."""


def tool_form(tool: ToolSpec) -> Form:
    """A tool as chat templates expect it: as the harness wrote it, or built from the spec's fields."""
    if tool.raw is not None:
        return tool.raw
    function: Form = {"name": tool.name, "description": tool.description}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def message_forms(messages: Sequence[Message], shape: Shape, *, start: int = 0) -> Iterator[Form]:
    """Messages as chat templates expect them, in order; what came from a message is traced to its index.

    `start`: the index of the first.
    """
    moved: list[JsonValue] = []
    for index, message in enumerate(messages, start):
        if moved and message.role is not Role.TOOL:
            yield {"role": uniform("user", TEMPLATE), "content": moved}
            moved = []
        if shape.move_images and message.role is Role.TOOL:
            moved = [*moved, *(_part_form(part, index) for part in message.parts if isinstance(part, Image))]
            kept = tuple(part for part in message.parts if not isinstance(part, Image))
            message = msgspec.structs.replace(message, parts=kept)
        yield _message_form(message, index, shape)
    if moved:
        yield {"role": uniform("user", TEMPLATE), "content": moved}


def _message_form(message: Message, index: int, shape: Shape) -> Form:
    """A message as chat templates expect it.

    As with transformers' `apply_chat_template`: a key without a value is left out, and reasoning stands under
    `reasoning_content` and `thinking`. Content is one string, all text parts joined, or, where there are images,
    the list of texts and images; where the message has tool calls and no text it is left out unless the shape says
    otherwise, else an absent text is "". Arguments are an object where they are one, else their text.
    """
    form: Form = {"role": uniform(message.role.value, TEMPLATE)}
    text, reasoning = message.text, message.reasoning
    if shape.one_thought and message.tool_calls and text and reasoning:
        text, reasoning = "", f"{reasoning}\n\n{text}"
    if any(isinstance(part, Image) for part in message.parts):
        form["content"] = [_part_form(part, index) for part in message.parts if not isinstance(part, Reasoning)]
    elif text or not message.tool_calls or shape.no_content == "empty":
        form["content"] = uniform(text, index)
    elif shape.no_content == "null":
        form["content"] = None
    if reasoning:
        form["reasoning_content"] = form["thinking"] = uniform(reasoning, index)
    if message.tool_calls:
        form["tool_calls"] = [_call_form(call, index, shape) for call in message.tool_calls]
    if message.role is Role.TOOL and message.tool_call_id:
        form["tool_call_id"] = uniform(_shown_id(message.tool_call_id, shape), index)
    if message.name:
        form["name"] = uniform(message.name, index)
    return form


def _call_form(call: ToolCall, index: int, shape: Shape) -> JsonValue:
    return {
        "type": uniform("function", TEMPLATE),
        "id": uniform(_shown_id(call.id, shape), index),
        "function": {
            "name": uniform(call.name, index),
            "arguments": traced_json(_arguments_form(call, shape), index),
        },
    }


def _shown_id(call_id: str, shape: Shape) -> str:
    if not shape.short_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _part_form(part: Text | Image, index: int) -> JsonValue:
    if isinstance(part, Image):
        return {"type": uniform("image", TEMPLATE)}  # which one it is templates need not know
    return {"type": uniform("text", TEMPLATE), "text": uniform(part.text, index)}


def _arguments_form(call: ToolCall, shape: Shape) -> JsonValue:
    parsed = None if call.freeform or shape.text_arguments else parse_arguments(call.arguments)
    if isinstance(parsed, dict):
        return parsed
    if not shape.only_objects:
        return call.arguments
    return {"arguments": call.arguments} if call.arguments.strip() not in ("", "null") else {}


def milder(forms: Sequence[Form]) -> Iterator[list[Form]]:
    """The same conversation for templates with a strict order of roles, each time a little further from the given.

    First: assistant messages without text and calls are left out, leading system messages are one, later ones are user
    messages, and neighbours of one role (user, or assistant without calls) are one message, joined by an empty line.
    Then also: what the user says right after a tool's result stands at the end of that result. A conversation with
    images in what would be joined is left.
    """
    said = [form for form in forms if form["role"] != "assistant" or "tool_calls" in form or form["content"]]
    merged = _joined(_one_system(said), after_results=False)
    if merged != list(forms):
        yield merged
    folded = _joined(merged, after_results=True)
    if folded != merged:
        yield folded


def _one_system(forms: Sequence[Form]) -> list[Form]:
    found: list[Form] = []
    for form in forms:
        leading = all(earlier["role"] == "system" for earlier in found)
        if form["role"] != "system" or (leading and not found):
            found.append(form)
        elif leading and _both_text(found[-1], form):
            found[-1] = _with(found[-1], form)
        else:
            found.append({**form, "role": uniform("user", TEMPLATE)})
    return found


def _joined(forms: Sequence[Form], *, after_results: bool) -> list[Form]:
    found: list[Form] = []
    for form in forms:
        last = found[-1] if found else {}
        role = form["role"]
        same = role == last.get("role") and role in ("user", "assistant")
        follows = after_results and role == "user" and last.get("role") == "tool"
        calls = "tool_calls" in form or "tool_calls" in last or "thinking" in form or "thinking" in last
        if (same or follows) and not calls and _both_text(last, form):
            found[-1] = _with(last, form)
        else:
            found.append(form)
    return found


def _both_text(first: Mapping[str, JsonValue], second: Mapping[str, JsonValue]) -> bool:
    return isinstance(first.get("content"), str) and isinstance(second.get("content"), str)


def _with(first: Form, second: Form) -> Form:
    before, after = first["content"], second["content"]
    assert isinstance(before, str) and isinstance(after, str)
    return {**first, "content": before + uniform("\n\n", TEMPLATE) + after if before and after else before or after}
