"""The `input` of a Responses request: items in, canonical messages out.

One answer of ours is several items (thought, message, calls), and a client may echo them with or without our ids.
So consecutive items of the assistant are one turn, unless their ids name different answers of this session.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import Image, JsonValue, Message, Part, Reasoning, Role, Text, ToolCall
from openforgerl.wire import reading
from openforgerl.wire.dialect import Memory
from openforgerl.wire.images import from_data_url
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad, present
from openforgerl.wire.responses_calls import owner_of, read_call
from openforgerl.wire.responses_tools import read_tools

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_ALWAYS = {"type", "id", "status", "created_by", "internal_chat_message_metadata_passthrough", "async", "async_"}
_CALL_FIELDS = _ALWAYS | {"call_id", "caller"}
_OUTPUT_FIELDS = _CALL_FIELDS | {"name", "namespace", "output"}
_FIELDS: dict[str, set[str]] = {
    "message": _ALWAYS | {"role", "content", "phase"},
    "agent_message": _ALWAYS | {"author", "recipient", "content"},
    "reasoning": _ALWAYS | {"summary", "content", "encrypted_content"},
    "function_call": _CALL_FIELDS | {"name", "namespace", "arguments", "encrypted_function_args"},
    "custom_tool_call": _CALL_FIELDS | {"name", "namespace", "input"},
    "local_shell_call": _CALL_FIELDS | {"action"},
    "tool_search_call": _CALL_FIELDS | {"execution", "arguments"},
    "function_call_output": _OUTPUT_FIELDS,
    "custom_tool_call_output": _OUTPUT_FIELDS,
    "local_shell_call_output": _OUTPUT_FIELDS,
    "tool_search_output": _CALL_FIELDS | {"execution", "tools"},
    "additional_tools": _ALWAYS | {"role", "tools"},
    "item_reference": {"type", "id"},
}
_PART_FIELDS = {
    "type",
    "text",
    "refusal",
    "annotations",
    "logprobs",
    "parsed",
    "image_url",
    "detail",
    "cache_control",
    "prompt_cache_breakpoint",
}
_SERVER_SIDE = {
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "program",
    "program_output",
    "compaction_trigger",
}
"""Records of what another server did by itself: left out of the prompt, with a warning."""

_SPEAKING = ("content", "output", "input", "arguments", "action", "encrypted_content", "text", "result", "tools")
"""Fields that tell the model something. An unknown kind of item with none of them is left out, with a warning."""


class _Turn:
    """An assistant turn under construction."""

    def __init__(self) -> None:
        self.owner: str | None = None
        """The call id that the ids of its items spell."""
        self._thoughts: dict[str, Reasoning] = {}
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def think(self, thought: Reasoning) -> None:
        """A thought of ours; each counts once, however many items carry its handle."""
        self._thoughts.setdefault(thought.handle or thought.text, thought)

    def say(self, text: str) -> None:
        """More text."""
        self._texts.append(text)

    def call(self, call: ToolCall) -> None:
        """One more call."""
        self._calls.append(call)

    def message(self) -> Message:
        """The turn as one message: thought, one text, calls in order, as a sampled answer is put together."""
        parts: list[Part] = []
        if self._thoughts:
            thoughts = list(self._thoughts.values())
            parts.append(Reasoning("".join(thought.text for thought in thoughts), thoughts[0].handle))
        if text := "".join(self._texts):
            parts.append(Text(text))
        return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=tuple(self._calls))


class InputReader:
    """Reads items in order into messages; their images go to the notes."""

    def __init__(self, memory: Memory, notes: Notes) -> None:
        self._memory = memory
        self._notes = notes
        self._turn: _Turn | None = None
        self._unsure = False
        """Whether an item belongs to an answer that may yet turn out to be of this session."""
        self._messages: list[Message] = []
        self._readers: dict[str, Callable[[dict[str, JsonValue], str], None]] = {
            "message": self._message,
            "agent_message": self._agent_message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "local_shell_call": self._call,
            "tool_search_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
            "tool_search_output": self._found_tools,
            "additional_tools": self._nothing,
            "item_reference": self._reference,
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of item that are read."""
        return tuple(self._readers)

    def read(self, value: JsonValue) -> list[Message]:
        """The messages of `input`. WireError 400 naming the item."""
        if isinstance(value, str):
            return [Message(role=Role.USER, parts=(Text(value),) if value else ())]
        if not isinstance(value, list):
            raise bad("input", f"must be a string or a list of items, not {reading.type_name(value)}")
        outer = self._notes
        passages = self._memory.rereading.passages(value, "responses", outer, self._messages)
        for at in range(passages.start, len(value)):
            self._notes = passages.notes
            self._item(value[at], f"input[{at}]")
            passages.item_read(ended=self._turn is None and not self._unsure)
        passages.end()
        self._notes = outer
        self._end_turn()
        return self._messages

    def _item(self, given: JsonValue, path: str) -> None:
        item = reading.mapping(given, path)
        kind = self._kind(item, path)
        reader = self._readers.get(kind)
        if reader is None:
            self._unknown(kind, item, path)
            return
        self._notes.check(item, _FIELDS[kind], f"input[].{kind}", path)
        reader(item, path)

    def _kind(self, item: dict[str, JsonValue], path: str) -> str:
        """The kind of an item; the two that may leave their type out are told by their fields."""
        kind = item.get("type")
        if kind is None and present(item, "role"):
            return "message"
        if kind is None and set(item) <= {"id", "type"} and present(item, "id"):
            return "item_reference"
        if not isinstance(kind, str):
            raise bad(f"{path}.type", f"must be the kind of item, such as `message`; got {reading.type_name(kind)}")
        return kind

    def _unknown(self, kind: str, item: dict[str, JsonValue], path: str) -> None:
        """Leave out what tells the model nothing; refuse what would."""
        if kind in _SERVER_SIDE or not any(present(item, name) for name in _SPEAKING):
            self._notes.warn(f"input: items of type {kind[:60]!r} were left out of the prompt")
            return
        raise WireError(
            400,
            "unsupported_content",
            f"{path}.type: items of type {kind[:60]!r} are not supported; send one of {', '.join(self.kinds)}",
            param=f"{path}.type",
        )

    def _assistant(self, item: dict[str, JsonValue]) -> _Turn:
        """The turn that an item of the assistant belongs to."""
        spelled = owner_of(item.get("id"))
        owner = None if spelled is None else spelled[1]
        self._unsure = self._unsure or (owner is not None and not self._ours(owner))
        turn = self._turn
        if turn is not None and owner and turn.owner and owner != turn.owner and self._ours(owner, turn.owner):
            self._end_turn()
            turn = None
        if turn is None:
            turn = self._turn = _Turn()
        turn.owner = owner or turn.owner
        return turn

    def _ours(self, *call_ids: str) -> bool:
        return any(self._memory.answered(call_id) is not None for call_id in call_ids)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None

    def _add(self, message: Message) -> None:
        self._end_turn()
        self._messages.append(message)

    def _message(self, item: dict[str, JsonValue], path: str) -> None:
        spelled = item.get("role")
        role = _ROLES.get(spelled) if isinstance(spelled, str) else None
        if role is None:
            got = repr(spelled[:40]) if isinstance(spelled, str) else reading.type_name(spelled)
            raise bad(f"{path}.role", f"must be one of {', '.join(_ROLES)}; got {got}")
        parts = self._content(item.get("content"), f"{path}.content", images=role is not Role.ASSISTANT)
        if role is Role.ASSISTANT:
            turn = self._assistant(item)
            for part in parts:
                if isinstance(part, Text):
                    turn.say(part.text)
            return
        self._add(Message(role=role, parts=parts, original_role=spelled if spelled != role.value else None))

    def _agent_message(self, item: dict[str, JsonValue], path: str) -> None:
        """What another agent says to this one is a user's message to the model."""
        content = item.get("content")
        if isinstance(content, list):
            encrypted = [part for part in content if isinstance(part, dict) and part.get("type") == "encrypted_content"]
            if encrypted:
                self._notes.warn("input: encrypted parts of an agent_message were left out of the prompt")
            content = [part for part in content if part not in encrypted]
        parts = self._content(content, f"{path}.content", images=True)
        self._add(Message(role=Role.USER, parts=parts, original_role="agent_message"))

    def _content(self, value: JsonValue, path: str, *, images: bool) -> tuple[Part, ...]:
        if isinstance(value, str):
            return (Text(value),) if value else ()
        if not isinstance(value, list):
            raise bad(path, f"must be a string or a list of parts, not {reading.type_name(value)}")
        parts: list[Part] = []
        for at, given in enumerate(value):
            part = self._part(reading.mapping(given, f"{path}[{at}]"), f"{path}[{at}]", images)
            if not isinstance(part, Text) or part.text:
                parts.append(part)
        return tuple(parts)

    def _part(self, given: dict[str, JsonValue], path: str, images: bool) -> Text | Image:
        kind = given.get("type")
        self._notes.check(given, _PART_FIELDS, "input[].content[]", path)
        if kind in ("input_text", "output_text", "text"):
            return Text(reading.text(given.get("text"), f"{path}.text"))
        if kind == "refusal":
            return Text(reading.text(given.get("refusal"), f"{path}.refusal"))
        if kind == "input_image" and images and present(given, "image_url"):
            image, content = from_data_url(reading.text(given["image_url"], f"{path}.image_url"), f"{path}.image_url")
            self._notes.images[image.sha256] = content
            return image
        if not isinstance(kind, str):
            raise bad(f"{path}.type", f"must be `input_text`, `output_text` or `input_image`; got {kind!r}"[:200])
        raise WireError(
            400,
            "unsupported_content",
            f"{path}.type: {kind[:60]!r} can't be taken here; send `input_text`"
            + (", or `input_image` with `image_url`" if images else ""),
            param=f"{path}.type",
        )

    def _reasoning(self, item: dict[str, JsonValue], path: str) -> None:
        """A thought counts only if it is one that the policy had in this session; its text is ours, not the item's."""
        handle = item.get("encrypted_content")
        thought = None
        if isinstance(handle, str) and handle:
            thought = self._memory.reasoning(handle)
        elif handle:
            raise bad(f"{path}.encrypted_content", f"must be a string, not {reading.type_name(handle)}")
        else:
            answer = self._answer(item.get("id"), "rs")
            thought = None if answer is None else _thought(answer)
        if thought is not None:
            self._assistant(item).think(thought)
        elif handle or any(present(item, name) and item[name] != [] for name in ("summary", "content")):
            self._notes.warn("input: a thought that is not of this session was left out of the prompt")

    def _call(self, item: dict[str, JsonValue], path: str) -> None:
        call = read_call(item, path, self._notes)
        self._assistant(item).call(call)

    def _output(self, item: dict[str, JsonValue], path: str) -> None:
        given = item.get("call_id")
        if given is None and item["type"] == "local_shell_call_output":
            given = item.get("id")  # where the API puts the call's id
        call_id = reading.text(given, f"{path}.call_id")
        value = item.get("output")
        parts = () if value is None else self._content(value, f"{path}.output", images=True)
        self._add(Message(role=Role.TOOL, parts=parts, tool_call_id=call_id))

    def _found_tools(self, item: dict[str, JsonValue], path: str) -> None:
        """Tools that a search found are shown in its result, under the names by which the model can call them.

        Adding them to the tools on offer would change the beginning of the prompt in the middle of a thread.
        """
        if not present(item, "call_id"):
            self._notes.warn("input: the result of a server-side tool search was left out of the prompt")
            return
        call_id = reading.text(item["call_id"], f"{path}.call_id")
        found = read_tools(item.get("tools"), f"{path}.tools", self._notes)
        text = msgspec.json.encode([spec.raw for spec in found.specs]).decode()
        self._add(Message(role=Role.TOOL, parts=(Text(text),), tool_call_id=call_id))

    def _nothing(self, item: dict[str, JsonValue], path: str) -> None:
        """An item that only brings tools says nothing by itself."""

    def _answer(self, given: JsonValue, prefix: str | None = None) -> Message | None:
        """The answer of this session that an item's id belongs to."""
        spelled = owner_of(given)
        if spelled is None or prefix not in (None, spelled[0]):
            return None
        conversation = self._memory.answered(spelled[1])
        return None if conversation is None else conversation.messages[-1]

    def _reference(self, item: dict[str, JsonValue], path: str) -> None:
        """One item of an answer of this session."""
        answer, spelled = self._answer(item.get("id")), owner_of(item.get("id"))
        if answer is None or spelled is None:
            raise bad(f"{path}.id", "names no item of an answer of this session; send the item itself")
        prefix, _, index = spelled
        turn = self._assistant(item)
        if prefix == "msg":
            turn.say(answer.text if index == 0 else "")
        elif prefix == "rs":
            thought = _thought(answer)
            if thought is not None:
                turn.think(thought)
        elif index < len(answer.tool_calls):
            turn.call(answer.tool_calls[index])
        else:
            raise bad(f"{path}.id", f"names call {index} of an answer with {len(answer.tool_calls)}")


def _thought(answer: Message) -> Reasoning | None:
    """The thought of a recorded answer as one."""
    handle = next((part.handle for part in answer.parts if isinstance(part, Reasoning)), None)
    return Reasoning(answer.reasoning, handle) if answer.reasoning else None
