"""Clients of the Responses API, as far as tests need them: they read a stream and send items back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from openforgerl.types import Conversation, FinishReason, Message, MessageDelta, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Answer, Head, MessageBuilder, Request, SseReader
from openforgerl.wire.rereading import Rereading
from openforgerl.wire.responses import ResponsesDialect

DIALECT = ResponsesDialect()
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PIXEL_BYTES = 70
HEAD = Head(call_id="0123456789abcdef", model="policy", created=1_700_000_000, handle="Ab_-9")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Sub-agents.",
        "tools": [
            {"type": "function", "name": "spawn_agent", "description": "Starts one.", "parameters": {"type": "object"}},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}},
]
"""One tool of every kind that a client can be asked to call."""


class Remembered:
    """A session's memory, filled by hand."""

    def __init__(self) -> None:
        self.rereading = Rereading()
        self.thoughts: dict[str, Reasoning] = {}
        self.answers: dict[str, Conversation] = {}

    def reasoning(self, handle: str) -> Reasoning | None:
        return self.thoughts.get(handle)

    def answered(self, call_id: str) -> Conversation | None:
        return self.answers.get(call_id)

    def keep(self, head: Head, request: Request, message: Message) -> None:
        """An answer as the proxy records it."""
        if message.reasoning:
            self.thoughts[head.handle] = Reasoning(message.reasoning, head.handle)
        conversation = request.conversation
        self.answers[head.call_id] = Conversation(messages=(*conversation.messages, message), tools=conversation.tools)


def remembering() -> Remembered:
    """A session with one answer: call `c7` thought, spoke and called twice."""
    memory = Remembered()
    thought = Reasoning("my thought", "HANDLE")
    calls = (ToolCall(id="call0", name="f", arguments="{}"), ToolCall(id="call1", name="g", arguments="oops"))
    memory.thoughts["HANDLE"] = thought
    question = Message(role=Role.USER, parts=(Text("hi"),))
    answer = Message(role=Role.ASSISTANT, parts=(thought, Text("said")), tool_calls=calls)
    memory.answers["c7"] = Conversation(messages=(question, answer))
    return memory


def events_of(data: bytes, cut: int | None = None) -> list[dict[str, Any]]:
    """The events of a stream, which may arrive in two reads. Each names its type twice, alike."""
    reader = SseReader()
    found = reader.feed(data) if cut is None else reader.feed(data[:cut]) + reader.feed(data[cut:])
    events = [json.loads(event.data) for event in found]
    assert [event.event for event in found] == [event["type"] for event in events]
    return events


def done_items(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Codex takes from a stream: the items that are done."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def grown_items(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client has that goes by deltas alone: every item as it was added, with its deltas in place."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            items[at] = json.loads(json.dumps(event["item"]))
        elif kind == "reasoning_summary_part.added":
            items[at]["summary"].append(dict(event["part"]))
        elif kind == "content_part.added":
            items[at]["content"].append(dict(event["part"]))
        elif kind == "reasoning_summary_text.delta":
            items[at]["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "output_text.delta":
            items[at]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[at]["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            items[at]["input"] += event["delta"]
        elif kind == "output_item.done":
            # Only the finished item tells how it ended and what brings its thought back.
            items[at] |= {key: event["item"][key] for key in ("status", "encrypted_content") if key in event["item"]}
    return [items[at] for at in sorted(items)]


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as OpenClaw and opencode send them back: no ids, no status, arguments encoded anew."""
    echoed: list[dict[str, Any]] = []
    for item in items:
        kept = {key: value for key, value in item.items() if key not in ("id", "status")}
        if kept["type"] == "message":
            kept["content"] = [{"type": "output_text", "text": part["text"]} for part in kept["content"]]
        if kept["type"] == "function_call":
            with contextlib.suppress(ValueError):
                kept["arguments"] = json.dumps(json.loads(kept["arguments"]), separators=(",", ":"))
        echoed.append(kept)
    return echoed


def ask(memory: Remembered | None = None, *, strict: bool = False, **body: Any) -> Request:
    """A request read by the dialect."""
    body = {"model": "policy", "input": "hi", **body}
    return DIALECT.parse(json.dumps(body).encode(), strict=strict, memory=memory or Remembered())


def call(index: int, name: str, *pieces: str, call_id: str = "") -> list[MessageDelta]:
    """The deltas of an answer's call number `index`."""
    call_id = call_id or f"call{index}"
    opening = MessageDelta(kind="call", text=name, call_index=index, call_id=call_id)
    return [opening] + [
        MessageDelta(kind="arguments", text=piece, call_index=index, call_id=call_id) for piece in pieces
    ]


def think(text: str) -> MessageDelta:
    return MessageDelta(kind="reasoning", text=text)


def say(text: str) -> MessageDelta:
    return MessageDelta(kind="text", text=text)


def answer_of(deltas: list[MessageDelta], request: Request, finish: FinishReason) -> Answer:
    """The answer that these deltas make, as the proxy records it."""
    built = MessageBuilder()
    built.add(deltas)
    message = built.message()
    parts = tuple(Reasoning(part.text, HEAD.handle) if isinstance(part, Reasoning) else part for part in message.parts)
    sent = DIALECT.sent(msgspec.structs.replace(message, parts=parts), request)
    return Answer(message=sent, finish=finish, prompt_tokens=3, completion_tokens=5)
