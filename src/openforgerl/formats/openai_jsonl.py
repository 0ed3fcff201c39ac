"""OpenAI's chat fine-tuning lines: messages and tools, and `weight` 0 on assistant turns that must not train.

Text only: whoever trains on it tokenises again, so what was sampled is not what trains. `reasoning_content` is the
de-facto key for thoughts. Source: OpenAI API reference, "Fine-tuning", chat model input; `weight` there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from openforgerl.errors import WireError
from openforgerl.formats.files import LineFile, json_lines
from openforgerl.formats.importing import Imported, as_imported
from openforgerl.formats.records import AttemptRecord, Decode, Report, Tally
from openforgerl.formats.turns import RowTurns, row_turns
from openforgerl.rendering.shapes import tool_form
from openforgerl.types import Image, JsonValue, Message, Role, ToolCall
from openforgerl.wire.chat import ChatDialect

_TOLD_OTHERWISE = frozenset({"functions", "function_call", "system", "prompt", "completion"})
"""Keys beside `messages` and `tools` that say what the model saw or answered in lines of other kinds."""

_DROPPED = ("refusal", "function_call", "audio")
"""Fields of an assistant message that our dialect knows, and no answer of ours has."""


class OpenAiJsonl:
    """Writes `openai-jsonl`: one line per row in which an assistant turn trains."""

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._file = LineFile(out)
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """The record's rows as conversations."""
        calls = {call.call_id: call for call in record.calls}
        for sample in record.samples.samples:
            found = row_turns(sample, calls)
            if found is None or not any(turn.trains for turn in found.turns):
                self._tally.lost("rows without a turn that trains")
                self._tally.lost("trained tokens of such rows", sample.trained_tokens)
                continue
            messages = found.conversation.messages
            if any(isinstance(part, Image) for message in messages for part in message.parts):
                self._tally.lost("rows with images")
                continue
            self._file.write(msgspec.json.encode(_line(found)))
            self._tally.row(sample)
            self._tally.lost("trained tokens of turns that are not shown whole", found.unplaced)
            self._tally.lost("token ids (text only)", len(sample.ids))
            self._tally.lost("log-probs", len(sample.logprobs or ()))
            self._tally.lost("rewards (one per row)")
            self._tally.lost("error marks of tool results", sum(message.is_error for message in messages))

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


def read_openai_jsonl(path: Path) -> list[Imported]:
    """The conversations of a file of such lines. InputError naming the line and field that cannot be taken."""
    found: list[Imported] = []
    clock = path.stat().st_mtime

    def take(line: bytes) -> None:
        row: Any = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError("the line is no JSON object")
        try:
            request = ChatDialect().parse(
                msgspec.json.encode({"messages": row.get("messages"), "tools": row.get("tools")})
            )
        except WireError as error:
            raise ValueError(error.message) from error
        conversation = request.conversation
        weights = _weights(row["messages"])
        places = [at for at, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
        trains = [at for at, weight in zip(places, weights, strict=True) if weight]
        dropped = [f"messages[].{name}" for name in _DROPPED if any(message.get(name) for message in row["messages"])]
        unlisted = [*request.unlisted, *dropped, *sorted(row.keys() & _TOLD_OTHERWISE)]
        unread = [f"{name} is not read" for name in unlisted]
        name = f"{path}:{len(found) + 1}"
        found.append(as_imported(name, conversation, trains, clock=clock, notes=[*request.warnings, *unread]))

    json_lines(path, take)
    return found


def openai_message(message: Message) -> dict[str, JsonValue]:
    """A message as chat completions writes it; parts of one kind are joined, as templates see them."""
    form: dict[str, JsonValue] = {"role": message.original_role or message.role.value}
    form["content"] = None if message.tool_calls and not message.text else message.text
    if message.reasoning:
        form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    if message.name:
        form["name"] = message.name
    return form


def _line(row: RowTurns) -> dict[str, JsonValue]:
    messages = [openai_message(message) for message in row.conversation.messages]
    for turn in row.turns:
        if not turn.trains:
            messages[turn.index]["weight"] = 0
    line: dict[str, JsonValue] = {"messages": messages}
    if row.conversation.tools:
        line["tools"] = [tool_form(tool) for tool in row.conversation.tools]
    return line


def _call(call: ToolCall) -> dict[str, JsonValue]:
    if call.freeform:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _weights(messages: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether each assistant message trains, in order; `weight` is 0 or 1, and 1 where it is absent."""
    weights: list[bool] = []
    for message in messages:
        if message.get("role") == "assistant":
            weight = message.get("weight", 1)
            if weight not in (0, 1):
                raise ValueError(f"weight must be 0 or 1; got {weight!r}")
            weights.append(bool(weight))
    return weights
