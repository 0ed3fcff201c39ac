"""OpenAI chat completions, both ways (API reference: "Chat Completions", "Streaming").

Images come as `data:` URLs in user and tool messages; whether the model takes any is the renderer's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import (
    Conversation,
    ForcedCall,
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
from openforgerl.wire import images, reading
from openforgerl.wire.chat_answers import ChatStream, error_body, models_body, whole_body
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
from openforgerl.wire.fields import CHAT
from openforgerl.wire.notes import Notes
from openforgerl.wire.opening import joined_system
from openforgerl.wire.reading import bad, present
from openforgerl.wire.rereading import Rereading

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_MESSAGE_FIELDS = {"role", "content", "name", "cache_control"}
_ASSISTANT_FIELDS = {"tool_calls", "reasoning_content", "reasoning", "refusal", "function_call", "audio"}
_CALL_FIELDS = {"id", "type", "function", "index"}
_FUNCTION_FIELDS = {"name", "arguments"}
_PART_FIELDS = {"type", "text", "refusal", "thinking", "cache_control", "signature", "image_url", "detail"}
_WITH_IMAGES = (Role.USER, Role.TOOL)


class ChatDialect:
    """The dialect `chat`."""

    name = "chat"
    cut_after_failure = True

    def parse(
        self, body: bytes, *, strict: bool = False, address: Address = BODY_ALONE, memory: Memory = NOTHING_YET
    ) -> Request:
        """The request in `body`. Raises WireError 400 naming the field and what is accepted."""
        raw, warnings = reading.decode_object(body, memory.rereading)
        notes = Notes(strict=strict, warnings=warnings)
        CHAT.check(raw, notes)
        tools, forced = _tools(raw, notes)
        messages = _messages(raw, notes, memory.rereading)
        stream_options = reading.mapping(raw.get("stream_options") or {}, "stream_options")
        limits = [
            reading.count(raw[name], name) for name in ("max_tokens", "max_completion_tokens") if present(raw, name)
        ]
        return Request(
            dialect=self.name,
            model=reading.text(raw["model"], "model") if present(raw, "model") else "",
            conversation=Conversation(messages=messages, tools=tools),
            stream=reading.flag(raw["stream"], "stream") if present(raw, "stream") else False,
            include_usage=reading.flag(stream_options.get("include_usage") or False, "stream_options.include_usage"),
            max_tokens=min(limits, default=None),
            stop=_stop(raw.get("stop")),
            forced=forced,
            images=notes.images,
            logprobs=reading.flag(raw["logprobs"], "logprobs") if present(raw, "logprobs") else False,
            asked=_asked(raw),
            raw=raw,
            unlisted=notes.unlisted,
            warnings=notes.warnings,
        )

    def sent(self, message: Message, request: Request) -> Message:
        """The message itself: chat carries text, thoughts and calls as they are."""
        return message

    def writer(self, head: Head, request: Request) -> StreamWriter:
        """A writer of `chat.completion.chunk` events."""
        return ChatStream(head, include_usage=request.include_usage)

    def whole(self, head: Head, request: Request, answer: Answer) -> dict[str, JsonValue]:
        """A `chat.completion` object."""
        return whole_body(head, answer)

    def counted(self, tokens: int) -> dict[str, JsonValue]:
        """Chat completions has no such question; the answer of servers that have one."""
        return {"count": tokens}

    def status(self, error: WireError) -> int:
        """The error's own."""
        return error.status

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """OpenAI's error object."""
        return error_body(error)

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The answer of `/v1/models`."""
        return models_body(names)


def _asked(raw: dict[str, JsonValue]) -> dict[str, JsonValue]:
    asked = reading.numbers(raw, reading.SAMPLING)
    for name in ("max_tokens", "max_completion_tokens", "stop"):
        if present(raw, name):
            asked[name] = raw[name]
    return asked


def _stop(value: JsonValue) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value] if value else []
    return reading.stop_strings(value, "stop")


def _tools(raw: dict[str, JsonValue], notes: Notes) -> tuple[tuple[ToolSpec, ...], ForcedCall | None]:
    """The tools that the prompt offers, and the call that the answer must open with."""
    tools: list[ToolSpec] = []
    for at, item in enumerate(reading.items(raw.get("tools") or [], "tools")):
        tool = _tool(reading.mapping(item, f"tools[{at}]"), f"tools[{at}]", notes)
        if tool is not None:
            tools.append(tool)
    choice = raw.get("tool_choice")
    if choice == "none":
        # Nothing but a grammar could keep the policy from calling a tool that the prompt offers.
        return (), None
    if choice in (None, "auto"):
        return tuple(tools), None
    return tuple(tools), _forced(choice, tools)


def _forced(choice: JsonValue, tools: Sequence[ToolSpec]) -> ForcedCall:
    if choice == "required":
        if not tools:
            raise bad("tool_choice", "`required` needs a tool to call; `tools` offers none that the model can")
        return ForcedCall()
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise bad("tool_choice", "must be `none`, `auto`, `required` or `{type: function, function: {name}}`")
    function = reading.mapping(choice.get("function"), "tool_choice.function")
    name = reading.text(function.get("name"), "tool_choice.function.name")
    if all(tool.name != name for tool in tools):
        raise bad("tool_choice.function.name", f"must name one of `tools` that the model can call; got {name[:100]!r}")
    return ForcedCall(name=name)


def _tool(given: dict[str, JsonValue], path: str, notes: Notes) -> ToolSpec | None:
    kind = given.get("type", "function")
    if kind == "custom":
        raise WireError(
            400,
            "unsupported_field",
            f"{path}.type: freeform tools are not supported; use `function`",
            param=f"{path}.type",
        )
    if kind != "function":
        notes.warn(f"{path}: server-side tool {kind!r} was left out of the prompt")
        return None
    function = reading.mapping(given.get("function"), f"{path}.function")
    name = reading.text(function.get("name"), f"{path}.function.name")
    if not name:
        raise bad(f"{path}.function.name", "must not be empty")
    description = function.get("description")
    parameters = function.get("parameters")
    shown = {key: value for key, value in given.items() if key != "cache_control"}
    shown["function"] = {key: value for key, value in function.items() if key != "cache_control"}
    return ToolSpec(
        name=name,
        description="" if description is None else reading.text(description, f"{path}.function.description"),
        parameters=None if parameters is None else reading.mapping(parameters, f"{path}.function.parameters"),
        raw={"type": "function", **shown} if "type" not in shown else shown,
    )


def _messages(raw: dict[str, JsonValue], notes: Notes, rereading: Rereading) -> tuple[Message, ...]:
    if not present(raw, "messages"):
        raise bad("messages", "is required: a list of messages")
    given = reading.items(raw["messages"], "messages")
    if not given:
        raise bad("messages", "must hold at least one message")
    return tuple(joined_system(rereading.messages(given, "chat", notes, _messages_at)))


def _messages_at(at: int, item: JsonValue, notes: Notes) -> list[Message]:
    path = f"messages[{at}]"
    return [_message(reading.mapping(item, path), path, notes)]


def _message(given: dict[str, JsonValue], path: str, notes: Notes) -> Message:
    spelled = given.get("role")
    role = _ROLES.get(spelled) if isinstance(spelled, str) else None
    if role is None:
        raise bad(f"{path}.role", f"must be one of {', '.join(_ROLES)}; got {spelled!r}")
    extra = _ASSISTANT_FIELDS if role is Role.ASSISTANT else {"tool_call_id"} if role is Role.TOOL else set[str]()
    notes.check(given, _MESSAGE_FIELDS | extra, "messages[]", path)
    parts = _content(given.get("content"), role, f"{path}.content", notes)
    name = reading.text(given["name"], f"{path}.name") if present(given, "name") else None
    if role is Role.ASSISTANT:
        if given.get("function_call"):
            raise WireError(
                400,
                "unsupported_field",
                f"{path}.function_call: the legacy form is not supported; use `tool_calls`",
                param=f"{path}.function_call",
            )
        return Message(
            role=role,
            parts=(*_reasoning(given, path, notes), *parts),
            tool_calls=_calls(given.get("tool_calls"), f"{path}.tool_calls", notes),
            name=name,
        )
    return Message(
        role=role,
        parts=parts,
        tool_call_id=reading.text(given.get("tool_call_id"), f"{path}.tool_call_id") if role is Role.TOOL else None,
        name=name,
        original_role=spelled if spelled != role.value else None,
    )


def _reasoning(given: dict[str, JsonValue], path: str, notes: Notes) -> tuple[Reasoning, ...]:
    """The thought under either of its two spellings; `reasoning_content`, which we write, wins."""
    for name in ("reasoning_content", "reasoning"):
        value = given.get(name)
        if value is None or value == "":
            continue
        if name == "reasoning" and not isinstance(value, str):
            notes.warn(f"{path}.reasoning is {reading.type_name(value)} and was left out of the prompt")
            continue
        return (Reasoning(reading.text(value, f"{path}.{name}")),)
    return ()


def _content(value: JsonValue, role: Role, path: str, notes: Notes) -> tuple[Part, ...]:
    if value is None:
        if role in (Role.ASSISTANT, Role.TOOL):
            return ()
        raise bad(path, "must be a string or a list of parts; it is missing")
    if isinstance(value, str):
        return (Text(value),) if value else ()
    if not isinstance(value, list):
        raise bad(path, f"must be a string or a list of parts, not {reading.type_name(value)}")
    parts = (
        _part(reading.mapping(item, f"{path}[{at}]"), role, f"{path}[{at}]", notes) for at, item in enumerate(value)
    )
    return tuple(part for part in parts if isinstance(part, Image) or part.text)


def _part(given: dict[str, JsonValue], role: Role, path: str, notes: Notes) -> Part:
    kind = given.get("type")
    if kind == "text":
        part = Text(reading.text(given.get("text"), f"{path}.text"))
    elif kind == "refusal":
        part = Text(reading.text(given.get("refusal"), f"{path}.refusal"))
    elif kind == "thinking":
        part = Reasoning(reading.text(given.get("thinking"), f"{path}.thinking"))
    elif kind in ("image_url", "input_image") and role in _WITH_IMAGES:
        part = _image(given.get("image_url"), f"{path}.image_url", notes)
    elif kind in ("image_url", "input_image", "image", "input_audio", "file", "video_url"):
        what = "text" if role not in _WITH_IMAGES else "text and images (`image_url`)"
        raise WireError(
            400,
            "unsupported_content",
            f"{path}.type: {role.value} messages hold {what} only here, not {kind!r}",
            param=f"{path}.type",
        )
    else:
        raise bad(f"{path}.type", f"must be `text` or `image_url`; got {kind!r}")
    notes.check(given, _PART_FIELDS, "messages[].content[]", path)
    return part


def _image(value: JsonValue, path: str, notes: Notes) -> Image:
    """An image under either spelling: `{"url": ...}` or the URL itself."""
    url = reading.text(value["url"] if isinstance(value, dict) and "url" in value else value, f"{path}.url")
    image, content = images.from_data_url(url, f"{path}.url")
    notes.images[image.sha256] = content
    return image


def _calls(value: JsonValue, path: str, notes: Notes) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    return tuple(
        _call(reading.mapping(item, f"{path}[{at}]"), f"{path}[{at}]", notes)
        for at, item in enumerate(reading.items(value, path))
    )


def _call(given: dict[str, JsonValue], path: str, notes: Notes) -> ToolCall:
    kind = given.get("type", "function")
    if kind not in ("function", None):
        raise bad(f"{path}.type", f"must be `function`; got {kind!r}")
    notes.check(given, _CALL_FIELDS, "messages[].tool_calls[]", path)
    function = reading.mapping(given.get("function"), f"{path}.function")
    notes.check(function, _FUNCTION_FIELDS, "messages[].tool_calls[].function", f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        notes.warn(f"{path}.function.arguments came as an object; its text is our own encoding")
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(
        id=reading.text(given.get("id"), f"{path}.id"),
        name=reading.text(function.get("name"), f"{path}.function.name"),
        arguments="" if arguments is None else reading.text(arguments, f"{path}.function.arguments"),
    )
