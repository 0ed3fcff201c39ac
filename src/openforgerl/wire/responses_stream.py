"""A Responses answer as a stream of events (API reference, "Streaming events").

One item at a time: it is added, grows, and is done before the next one is added, because clients take what is done
and act on it at once. The list in `response.completed` is the very list of items that were done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from openforgerl.errors import ExactnessError, WireError
from openforgerl.types import FinishReason, JsonValue, MessageDelta, ToolCall
from openforgerl.wire.dialect import Answer, Head, Request
from openforgerl.wire.responses_answers import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ended,
    message_item,
    reasoning_item,
    response_object,
    says_nothing,
    stream_error,
    summary_part,
    text_part,
)
from openforgerl.wire.responses_calls import call_item, tool_of
from openforgerl.wire.responses_freeform import FreeformText
from openforgerl.wire.responses_tools import Kind, WireTool
from openforgerl.wire.sse import comment, encode_event


class _Events:
    """Numbers events and spells them."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: JsonValue) -> bytes:
        body = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return encode_event(msgspec.json.encode(body), kind)


class _Item(Protocol):
    """An item that is growing."""

    @property
    def kind(self) -> str: ...

    def added(self) -> bytes:
        """Its opening events."""
        ...

    def grow(self, text: str) -> bytes:
        """More of its text, or of its arguments."""
        ...

    def done(self, status: str) -> tuple[bytes, dict[str, JsonValue]]:
        """Its closing events, and the item."""
        ...


class _Thought:
    kind = "reasoning"

    def __init__(self, events: _Events, at: int, head: Head, index: int) -> None:
        self._events, self._at, self._head, self._index = events, at, head, index
        self._text = ""
        self._item = reasoning_item(head, index, "")

    def _event(self, kind: str, **fields: JsonValue) -> bytes:
        where = {"item_id": self._item["id"], "output_index": self._at, "summary_index": 0}
        return self._events.event(f"response.reasoning_summary_{kind}", **where, **fields)

    def added(self) -> bytes:
        # Only the finished item carries the handle: until then there is no thought that it could bring back.
        item = {**self._item, "summary": [], "encrypted_content": None}
        return self._events.event("response.output_item.added", output_index=self._at, item=item) + self._event(
            "part.added", part=summary_part("")
        )

    def grow(self, text: str) -> bytes:
        self._text += text
        return self._event("text.delta", delta=text)

    def done(self, status: str) -> tuple[bytes, dict[str, JsonValue]]:
        item = reasoning_item(self._head, self._index, self._text)
        closing = self._event("text.done", text=self._text) + self._event("part.done", part=summary_part(self._text))
        return closing + self._events.event("response.output_item.done", output_index=self._at, item=item), item


class _Message:
    kind = "message"

    def __init__(self, events: _Events, at: int, head: Head, index: int) -> None:
        self._events, self._at, self._head, self._index = events, at, head, index
        self._text = ""
        self._item = message_item(head, index, "", IN_PROGRESS)

    def _event(self, kind: str, **fields: JsonValue) -> bytes:
        where = {"item_id": self._item["id"], "output_index": self._at, "content_index": 0}
        return self._events.event(f"response.{kind}", **where, **fields)

    def added(self) -> bytes:
        item = {**self._item, "content": []}
        return self._events.event("response.output_item.added", output_index=self._at, item=item) + self._event(
            "content_part.added", part=text_part("")
        )

    def grow(self, text: str) -> bytes:
        self._text += text
        return self._event("output_text.delta", delta=text, logprobs=[])

    def done(self, status: str) -> tuple[bytes, dict[str, JsonValue]]:
        item = message_item(self._head, self._index, self._text, status)
        closing = self._event("output_text.done", text=self._text, logprobs=[])
        closing += self._event("content_part.done", part=text_part(self._text))
        return closing + self._events.event("response.output_item.done", output_index=self._at, item=item), item


class _Call:
    """A call. What its item carries in pieces is streamed; the other kinds are known only when they are whole."""

    def __init__(self, events: _Events, at: int, head: Head, delta: MessageDelta, tool: WireTool) -> None:
        self._events, self._at, self._head, self._tool = events, at, head, tool
        self.kind = tool.kind.value
        self.index = delta.call_index
        self._call = ToolCall(id=delta.call_id, name=delta.text, arguments="")
        self._arguments: list[str] = []
        self._freeform = FreeformText()

    def _item(self, arguments: str, status: str, tool: WireTool) -> dict[str, JsonValue]:
        call = msgspec.structs.replace(self._call, arguments=arguments)
        return call_item(call, tool, self._head, self.index, status)

    def _event(self, kind: str, item: dict[str, JsonValue], **fields: JsonValue) -> bytes:
        return self._events.event(f"response.{kind}", item_id=item["id"], output_index=self._at, **fields)

    def _added(self, tool: WireTool) -> bytes:
        item = self._item("", IN_PROGRESS, tool)
        return self._events.event("response.output_item.added", output_index=self._at, item=item)

    def added(self) -> bytes:
        return self._added(self._tool) if self._tool.kind in (Kind.FUNCTION, Kind.CUSTOM) else b""

    def grow(self, text: str) -> bytes:
        self._arguments.append(text)
        if self._tool.kind is Kind.CUSTOM:
            return self._input(self._freeform.feed(text))
        if self._tool.kind is Kind.FUNCTION:
            item = self._item("", IN_PROGRESS, self._tool)
            return self._event("function_call_arguments.delta", item, delta=text) if text else b""
        return b""

    def _input(self, text: str) -> bytes:
        item = self._item("", IN_PROGRESS, self._tool)
        return self._event("custom_tool_call_input.delta", item, delta=text) if text else b""

    def done(self, status: str) -> tuple[bytes, dict[str, JsonValue]]:
        arguments = "".join(self._arguments)
        item = self._item(arguments, status, self._tool)
        closing = b""
        if self._tool.kind is Kind.CUSTOM:
            closing += self._input(self._freeform.finish())
            closing += self._event("custom_tool_call_input.done", item, input=item["input"])
        elif item["type"] == Kind.FUNCTION:
            if self._tool.kind is not Kind.FUNCTION:  # held back, and now known not to fit its own kind
                closing += self._added(WireTool(kind=Kind.FUNCTION, name=self._tool.name))
                closing += self._event("function_call_arguments.delta", item, delta=arguments)
            closing += self._event("function_call_arguments.done", item, arguments=arguments)
        else:
            opening = {**item, "status": IN_PROGRESS}
            closing += self._events.event("response.output_item.added", output_index=self._at, item=opening)
        return closing + self._events.event("response.output_item.done", output_index=self._at, item=item), item


class ResponsesStream:
    """Events in the order that clients rely on: created, items one after the other, completed."""

    def __init__(self, head: Head, request: Request, tools: Mapping[str, WireTool]) -> None:
        self._head = head
        self._request = request
        self._tools = tools
        self._events = _Events()
        self._opened = False
        self._done: list[dict[str, JsonValue]] = []
        self._current: _Item | None = None
        self._counts = {"reasoning": 0, "message": 0}

    def open(self, prompt_tokens: int) -> bytes:
        """`response.created` and `response.in_progress`."""
        self._opened = True
        body = response_object(self._head, self._request, IN_PROGRESS, [])
        return self._events.event("response.created", response=body) + self._events.event(
            "response.in_progress", response=body
        )

    def write(self, deltas: Sequence[MessageDelta]) -> bytes:
        """The deltas as events of their items."""
        return b"".join(self._write(delta) for delta in deltas)

    def _write(self, delta: MessageDelta) -> bytes:
        current = self._current
        if delta.kind == "call":
            tool = tool_of(delta.text, self._tools)
            return self._next(_Call(self._events, self._ahead, self._head, delta, tool))
        if delta.kind == "arguments":
            if not isinstance(current, _Call) or current.index != delta.call_index:
                raise ExactnessError(f"arguments of tool call {delta.call_index} came outside of it")
            return current.grow(delta.text)
        if not delta.text:
            return b""
        kind = "message" if delta.kind == "text" else "reasoning"
        opening = b""
        if current is None or current.kind != kind:
            current = self._said(kind)
            opening = self._next(current)
        return opening + current.grow(delta.text)

    @property
    def _ahead(self) -> int:
        """The output index of the next item."""
        return len(self._done) + (self._current is not None)

    def _said(self, kind: str) -> _Item:
        index = self._counts[kind]
        self._counts[kind] += 1
        item = _Message if kind == "message" else _Thought
        return item(self._events, self._ahead, self._head, index)

    def _next(self, item: _Item) -> bytes:
        closing = self._close(COMPLETED)
        self._current = item
        return closing + item.added()

    def _close(self, status: str) -> bytes:
        if self._current is None:
            return b""
        closing, item = self._current.done(status)
        self._current = None
        self._done.append(item)
        return closing

    def close(self, answer: Answer) -> bytes:
        """The last item's end, then `response.completed`, or `response.incomplete` where the length limit cut."""
        kinds = [item["type"] for item in self._done]
        if self._current is not None:
            kinds.append(self._current.kind)
        closing = b""
        if says_nothing(kinds, answer.finish):
            closing += self._next(self._said("message"))
        closing += self._close(INCOMPLETE if answer.finish is FinishReason.LENGTH else COMPLETED)
        status = ended(answer)
        body = response_object(self._head, self._request, status, self._done, answer)
        return closing + self._events.event(f"response.{status}", response=body)

    def keep_alive(self) -> bytes:
        """A comment; once the stream is open an event, because some clients count events, not bytes, as life."""
        return self._events.event("keepalive") if self._opened else comment("keep-alive")

    def fail(self, error: WireError) -> bytes:
        """`response.failed`. Nothing follows it, so that no client takes the answer for a whole one."""
        body = response_object(self._head, self._request, "failed", self._done)
        return self._events.event("response.failed", response={**body, "error": stream_error(error)})
