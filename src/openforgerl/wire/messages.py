"""Anthropic Messages, both ways (API reference: "Create a Message", "Streaming Messages").

A user turn may carry tool results: each becomes a tool message of its own, in the order of the blocks. An
assistant turn is one message. What the policy thought goes out under a signature that is our own handle, and comes
back by it even where the client was shown no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.errors import WireError
from openforgerl.types import Conversation, ForcedCall, JsonValue, Message, Role, ToolSpec
from openforgerl.wire import messages_answers as answers
from openforgerl.wire import reading
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
from openforgerl.wire.messages_blocks import BlockReader
from openforgerl.wire.messages_fields import MESSAGES
from openforgerl.wire.notes import Notes
from openforgerl.wire.opening import joined_system
from openforgerl.wire.reading import bad, present

ATTRIBUTION = "x-anthropic-billing-header:"
"""How the first system block of claude-code begins unless `CLAUDE_CODE_ATTRIBUTION_HEADER=0`. It is data like any
other and stays, but it differs between conversations, so no two share the beginning of their prompts."""

CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_", "browser_")
"""Types of tools that the client runs and whose schema only the original server knows."""

_ASKED: dict[str, tuple[float, float]] = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 1e9)}
_TOOL_FIELDS = {
    "type",
    "name",
    "description",
    "input_schema",
    "cache_control",
    "defer_loading",
    "eager_input_streaming",
    "allowed_callers",
    "input_examples",
    "strict",
}


class MessagesDialect:
    """The dialect `messages`."""

    name = "messages"
    cut_after_failure = True

    def parse(
        self, body: bytes, *, strict: bool = False, address: Address = BODY_ALONE, memory: Memory = NOTHING_YET
    ) -> Request:
        """The request in `body`, to answer or to count. Raises WireError 400 naming the field."""
        raw, warnings = reading.decode_object(body, memory.rereading)
        notes = Notes(strict=strict, warnings=warnings)
        MESSAGES.check(raw, notes)
        reader = BlockReader(memory, notes)
        offered = _tools(raw, reader)
        forced = _forced(raw, offered, reader)
        tools = () if _choice(raw).get("type") == "none" else tuple(offered)
        messages = _messages(raw, reader, memory)
        _check_options(raw, reader)
        return Request(
            dialect=self.name,
            model=reading.text(raw["model"], "model") if present(raw, "model") else "",
            conversation=Conversation(messages=messages, tools=tools),
            stream=reading.flag(raw["stream"], "stream") if present(raw, "stream") else False,
            max_tokens=reading.count(raw["max_tokens"], "max_tokens") if present(raw, "max_tokens") else None,
            stop=reading.stop_strings(raw.get("stop_sequences"), "stop_sequences"),
            forced=forced,
            images=notes.images,
            asked=_asked(raw),
            raw=raw,
            unlisted=notes.unlisted,
            warnings=notes.warnings,
        )

    def sent(self, message: Message, request: Request) -> Message:
        """Arguments that are no JSON object become the object that `messages_answers.input_of` makes of them."""
        return answers.echoed(message)

    def writer(self, head: Head, request: Request) -> StreamWriter:
        """A writer of the events from `message_start` to `message_stop`."""
        return answers.MessagesStream(head, show_thoughts=_shows_thoughts(request))

    def whole(self, head: Head, request: Request, answer: Answer) -> dict[str, JsonValue]:
        """A `message` object."""
        return answers.whole_body(head, answer, show_thoughts=_shows_thoughts(request))

    def counted(self, tokens: int) -> dict[str, JsonValue]:
        """The answer of `/v1/messages/count_tokens`."""
        return {"input_tokens": tokens}

    def status(self, error: WireError) -> int:
        """The error's own, but for 503, which is 529 here: the status that clients of this API wait on."""
        return answers.OVERLOADED if error.status == 503 else error.status

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """Anthropic's error object."""
        return answers.error_body(error)

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The answer of `/v1/models`, one page."""
        return answers.models_body(names)


def _shows_thoughts(request: Request) -> bool:
    """Whether thoughts are sent with their text; with `thinking.display` omitted only their signature is."""
    thinking: JsonValue = request.raw.get("thinking") if isinstance(request.raw, dict) else None
    return not (isinstance(thinking, dict) and thinking.get("display") == "omitted")


def _asked(raw: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    asked = reading.numbers(raw, _ASKED)
    for name in ("max_tokens", "stop_sequences"):
        if present(raw, name):
            asked[name] = raw[name]
    return asked


def _check_options(raw: Mapping[str, JsonValue], reader: BlockReader) -> None:
    """Shapes of the options that hold fields of their own."""
    if present(raw, "thinking"):
        thinking = reading.mapping(raw["thinking"], "thinking")
        reader.notes.check(thinking, {"type", "budget_tokens", "display"}, "thinking", "thinking")
    if present(raw, "output_config"):
        config = reading.mapping(raw["output_config"], "output_config")
        reader.notes.check(config, {"effort", "format", "task_budget"}, "output_config", "output_config")
        if present(config, "format"):
            raise WireError(
                400,
                "unsupported_field",
                "output_config.format is not supported: answers are sampled freely; ask for the format in the prompt",
                param="output_config.format",
            )


def _choice(raw: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return reading.mapping(raw["tool_choice"], "tool_choice") if present(raw, "tool_choice") else {"type": "auto"}


def _forced(raw: Mapping[str, JsonValue], offered: Sequence[ToolSpec], reader: BlockReader) -> ForcedCall | None:
    choice = _choice(raw)
    reader.notes.check(choice, {"type", "name", "disable_parallel_tool_use"}, "tool_choice", "tool_choice")
    kind = choice.get("type")
    if kind in ("auto", "none"):
        return None
    if kind == "any":
        if not offered:
            raise bad("tool_choice.type", "`any` needs at least one tool with an `input_schema` in `tools`")
        return ForcedCall()
    if kind == "tool":
        name = reading.text(choice.get("name"), "tool_choice.name")
        if all(tool.name != name for tool in offered):
            raise bad("tool_choice.name", f"{name!r} is no tool with an `input_schema` in `tools`")
        return ForcedCall(name=name)
    shown = repr(kind) if isinstance(kind, str) else reading.type_name(kind)
    raise bad("tool_choice.type", f"must be `auto`, `any`, `tool` or `none`; got {shown}")


def _tools(raw: Mapping[str, JsonValue], reader: BlockReader) -> list[ToolSpec]:
    tools: list[ToolSpec] = []
    for index, item in enumerate(reading.items(raw["tools"] if present(raw, "tools") else [], "tools")):
        at = f"tools[{index}]"
        given = reading.mapping(item, at)
        kind = "custom" if given.get("type") is None else reading.text(given["type"], f"{at}.type")
        if kind.startswith(CLIENT_TOOLS):
            raise WireError(
                400,
                "unsupported_field",
                f"{at}.type: the schema of {kind!r} is not known here; offer the tool with an `input_schema`",
                param=f"{at}.type",
            )
        if kind != "custom" and not present(given, "input_schema"):
            reader.notes.warn(f"{at}: server-side tool {kind!r} was left out of the prompt")
            continue
        reader.notes.check(given, _TOOL_FIELDS, "tools[]", at)
        name = reading.text(given.get("name"), f"{at}.name")
        if not name:
            raise bad(f"{at}.name", "must not be empty")
        description = given.get("description")
        tools.append(
            ToolSpec(
                name=name,
                description="" if description is None else reading.text(description, f"{at}.description"),
                parameters=reading.mapping(given.get("input_schema"), f"{at}.input_schema"),
            )
        )
    return tools


def _messages(raw: Mapping[str, JsonValue], reader: BlockReader, memory: Memory) -> tuple[Message, ...]:
    given = reading.items(raw.get("messages"), "messages")
    if not given:
        raise bad("messages", "must hold at least one message")
    messages: list[Message] = []
    if present(raw, "system"):
        parts = reader.system(raw["system"], "system")
        if parts:
            messages.append(Message(role=Role.SYSTEM, parts=parts))
            if parts[0].text.startswith(ATTRIBUTION):
                reader.notes.warn("system[0] is an attribution header that differs between conversations; it was kept")

    def read_one(index: int, item: JsonValue, notes: Notes) -> list[Message]:
        at = f"messages[{index}]"
        return _message(reading.mapping(item, at), at, BlockReader(memory, notes))

    messages += memory.rereading.messages(given, "messages", reader.notes, read_one)
    if not messages:
        raise bad("messages", "must hold at least one message with content")
    if messages[-1].role is Role.ASSISTANT:
        reader.notes.warn("the last message is the assistant's; the answer is a new turn, it does not continue it")
    return tuple(joined_system(messages))


def _message(given: Mapping[str, JsonValue], at: str, reader: BlockReader) -> list[Message]:
    role = given.get("role")
    reader.notes.check(given, {"role", "content", "output_config", "cache_control"}, "messages[]", at)
    if role == "user":
        return reader.user(given.get("content"), f"{at}.content")
    if role == "assistant":
        return [reader.assistant(given.get("content"), f"{at}.content")]
    if role == "system":
        parts = reader.system(given.get("content"), f"{at}.content")
        return [Message(role=Role.SYSTEM, parts=parts)] if parts else []
    shown = repr(role) if isinstance(role, str) else reading.type_name(role)
    raise bad(f"{at}.role", f"must be user, assistant or system; got {shown}")
