"""Chat bodies of any kind, and a client that reads what comes of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.types import FinishReason, MessageDelta
from openforgerl.wire import Answer, ChatDialect, Head, MessageBuilder, Request, ShownToken, SseReader, TokenWriter

from .fuzzing import Target, kinds, mostly, objects, of, words

DIALECT = ChatDialect()

calls = st.one_of(
    of(id=words, type=st.just("function"), function=of(name=words, arguments=words | objects.map(json.dumps))),
    of(id=words, function=of(name=words, arguments=objects)),
    of(id=words, type=st.just("custom"), custom=of(name=words, input=words)),
)
urls = st.sampled_from(["data:image/png;base64,AAAA", "data:image/png;base64,A", "data:text/plain,x", "http://x"])
text_parts = of(type=st.just("text"), text=words)
shown_parts = st.one_of(
    text_parts,
    text_parts,
    of(type=st.just("image_url"), image_url=urls.map(lambda url: {"url": url, "detail": "low"}) | urls),
    of(type=st.just("input_audio"), input_audio=of(data=words)),
)
said_parts = st.one_of(
    text_parts, of(type=st.just("refusal"), refusal=words), of(type=st.just("thinking"), thinking=words)
)
messages = st.one_of(
    of(role=kinds("system", "developer"), content=words | st.lists(text_parts, max_size=2)),
    of(role=st.just("user"), content=words | st.lists(shown_parts, max_size=3)),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": words | st.none() | st.lists(said_parts, max_size=2)},
        optional={
            "tool_calls": st.lists(calls, max_size=3) | st.none(),
            "reasoning_content": words | st.none(),
            "reasoning": words | st.none() | of(effort=words),
            "refusal": words | st.none(),
            "function_call": st.none(),
            "name": words,
        },
    ),
    of(role=st.just("tool"), tool_call_id=words, content=words | st.none() | st.lists(shown_parts, max_size=2)),
)
odd_roles = of(role=kinds("function", "system ", "x"), name=words, content=words)
tools = st.one_of(
    of(
        type=st.just("function"),
        function=st.fixed_dictionaries(
            {"name": kinds("a", "b")},
            optional={"description": words | st.none(), "parameters": st.just({"type": "object"}) | st.none()},
        ),
    ),
    st.sampled_from([{"type": "web_search"}, {"type": "custom", "custom": {"name": "c"}}]),
)
choices = st.sampled_from(["auto", "auto", "none", "required", {"type": "function", "function": {"name": "a"}}])
whole_bodies = st.fixed_dictionaries(
    {"messages": st.lists(mostly(messages, odd_roles, one_in=40), min_size=1, max_size=4)},
    optional={
        "model": words,
        "tools": st.lists(tools, min_size=1, max_size=2),
        "tool_choice": choices,
        "parallel_tool_calls": st.booleans(),
        "stream": st.booleans(),
        "stream_options": st.sampled_from([{"include_usage": True}, {"include_usage": None}, {}, None]),
        "max_tokens": st.integers(1, 9),
        "max_completion_tokens": st.integers(1, 9) | st.just(3.0),
        "stop": words | st.lists(words, max_size=2),
        "temperature": st.floats(0, 2),
        "seed": st.integers(),
        "n": st.just(1),
        "logprobs": st.booleans(),
        "response_format": st.just({"type": "text"}),
        "shiny": objects,
    },
)


def _deltas() -> list[MessageDelta]:
    deltas = [MessageDelta(kind="reasoning", text="hm"), MessageDelta(kind="text", text="ok\n")]
    for at, arguments in enumerate(("{}", "{not json", "")):
        deltas.append(MessageDelta(kind="call", text="f", call_index=at, call_id=f"call{at}"))
        deltas.append(MessageDelta(kind="arguments", text=arguments, call_index=at))
    return deltas


def assembled(data: bytes) -> dict[str, Any]:
    """The message that a stream's deltas make, with the finish reason."""
    reader = SseReader()
    lines = [event.data for event in reader.feed(data)]
    assert lines[-1] == "[DONE]"
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": {}}
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role") or message["role"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", ()):
                call = message["tool_calls"].setdefault(
                    piece["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += piece.get("id", "")
                for name, text in piece["function"].items():
                    call["function"][name] += text
            message["finish_reason"] = choice["finish_reason"]
    message["tool_calls"] = [message["tool_calls"][at] for at in sorted(message["tool_calls"])]
    return message


def answered(request: Request) -> None:
    """The same message in a stream and whole."""
    built = MessageBuilder()
    built.add(_deltas())
    shown = (ShownToken(data=b"\xf0\x9f", logprob=-1.0),) if request.logprobs else None
    head = Head(call_id="c", model=request.model, created=0)
    end = Answer(
        message=DIALECT.sent(built.message(), request),
        finish=FinishReason.STOP,
        prompt_tokens=1,
        completion_tokens=2,
        tokens=shown,
    )
    writer = DIALECT.writer(head, request)
    if shown and isinstance(writer, TokenWriter):
        writer.show(shown)
    stream = assembled(writer.open(1) + writer.write(_deltas()) + writer.close(end))
    choice = json.loads(msgspec.json.encode(DIALECT.whole(head, request, end)))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert stream == {**choice["message"], "finish_reason": choice["finish_reason"]}


def refused(body: dict[str, Any], error: WireError) -> None:
    """OpenAI's error object."""
    assert body["error"] == {
        "message": error.message,
        "type": "invalid_request_error",
        "param": error.param,
        "code": error.code,
    }


TARGET = Target(dialect=DIALECT, whole=whole_bodies, answered=answered, refused=refused)
