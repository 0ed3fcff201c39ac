"""Messages bodies of any kind, and a client that reads what comes of them."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.types import FinishReason, MessageDelta
from openforgerl.wire import Answer, Head, MessageBuilder, MessagesDialect, Request

from .fuzzing import Target, anything, kinds, objects, of, words
from .messages_client import Remembered, assembled, events_of

DIALECT = MessagesDialect()

sources = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()},
        {"type": "base64", "media_type": "image/gif", "data": ""},
    ]
)
documents = st.sampled_from(
    [{"type": "text", "media_type": "text/plain", "data": "d"}, {"type": "content", "content": "c"}, {"type": "base64"}]
)
text_blocks = of(type=st.just("text"), text=words)
shown_blocks = text_blocks | st.one_of(
    of(type=st.just("image"), source=sources), of(type=st.just("document"), source=documents, title=st.none() | words)
)
results = of(
    type=st.just("tool_result"),
    tool_use_id=words,
    content=words | st.lists(shown_blocks | of(type=st.just("tool_reference"), tool_name=words), max_size=2),
    is_error=st.booleans() | st.none(),
)
systems = of(type=st.just("mid_conv_system"), content=st.lists(text_blocks, max_size=2))
answered = st.one_of(
    text_blocks,
    of(type=st.just("thinking"), thinking=words, signature=words),
    of(type=st.just("redacted_thinking"), data=words),
    of(type=st.just("tool_use"), id=words, name=words, input=objects),
)
message_bodies = st.one_of(
    of(role=st.just("user"), content=words | st.lists(shown_blocks | results | systems, max_size=3)),
    of(role=st.just("assistant"), content=words | st.lists(answered, max_size=3)),
    of(role=st.just("system"), content=words | st.lists(text_blocks, max_size=2)),
)
tools = of(name=kinds("a", "b"), input_schema=st.just({"type": "object"})) | st.sampled_from(
    [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
)
whole_bodies = st.fixed_dictionaries(
    {"messages": st.lists(message_bodies, min_size=1, max_size=3)},
    optional={
        "model": words,
        "system": words | st.lists(text_blocks, max_size=2),
        "tools": st.lists(tools, min_size=1, max_size=2),
        "tool_choice": st.sampled_from([{"type": kind, "name": "a"} for kind in ("auto", "any", "tool", "none")]),
        "stream": st.booleans(),
        "max_tokens": st.integers(1, 9),
        "stop_sequences": st.lists(kinds("a", "b"), max_size=2),
        "thinking": st.sampled_from([{"type": "adaptive", "display": "omitted"}, {"type": "disabled"}]),
        "output_config": st.sampled_from([{"effort": "low"}, {"format": None}, {"task_budget": 1}]),
        "shiny": anything,
    },
)


_DELTAS = [MessageDelta(kind="reasoning", text="hm"), MessageDelta(kind="text", text="ok")]


def answered(request: Request) -> None:
    """The same message in a stream and whole."""
    built = MessageBuilder()
    built.add(_DELTAS)
    head = Head(call_id="c", model=request.model, created=0, handle="h")
    end = Answer(message=built.message(), finish=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
    writer = DIALECT.writer(head, request)
    stream = assembled(events_of([writer.open(1) + writer.write(_DELTAS) + writer.close(end)]))
    assert stream == json.loads(json.dumps(DIALECT.whole(head, request, end)))


def refused(body: dict[str, Any], error: WireError) -> None:
    """Anthropic's error object."""
    detail = body["error"]
    assert error.status == 400
    assert detail["type"] == "invalid_request_error" and detail["message"]


TARGET = Target(
    dialect=DIALECT,
    whole=whole_bodies,
    answered=answered,
    refused=refused,
    memory=lambda: Remembered({"a": "thought"}),
)
