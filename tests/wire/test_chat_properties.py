"""Whatever the policy writes, a chat client's echo is what we recorded, arguments that are no JSON too."""

from __future__ import annotations

import json

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.types import Conversation, FinishReason, MessageDelta
from openforgerl.wire import Answer, Head, MessageBuilder, Request

from .fuzz_chat import DIALECT, assembled
from .fuzzing import objects, texts, values

arguments = (
    st.sampled_from(
        ["", "null", " null\n", "{}", "{", '{"file_list": ["a", "b"]', '"x"', "[1]", '{"a": 1} x', "\u00a0"]
    )
    | objects.map(json.dumps)
    | values.map(json.dumps)
    | texts
)
calls = st.lists(st.tuples(st.sampled_from(["bash", "read_file"]), arguments), max_size=3)


def in_pieces(kind: str, text: str, size: int, index: int = 0) -> list[MessageDelta]:
    return [
        MessageDelta(kind=kind, text=text[at : at + size], call_index=index)  # pyright: ignore[reportArgumentType]
        for at in range(0, len(text), size)
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(thought=texts, text=texts, calls=calls, size=st.integers(1, 6), usage=st.booleans())
def test_an_echo_is_what_was_recorded(
    thought: str, text: str, calls: list[tuple[str, str]], size: int, usage: bool
) -> None:
    """A call's first delta carries its id and name alone, its arguments follow in pieces of any size."""
    deltas = in_pieces("reasoning", thought, size) + in_pieces("text", text, size)
    for at, (name, given_arguments) in enumerate(calls):
        deltas.append(MessageDelta(kind="call", text=name, call_index=at, call_id=f"call{at}"))
        deltas += in_pieces("arguments", given_arguments, size, at)
    built = MessageBuilder()
    built.add(deltas)
    request = Request(dialect="chat", model="m", conversation=Conversation(messages=()), include_usage=usage)
    head = Head(call_id="c", model="m", created=0)
    message = DIALECT.sent(built.message(), request)
    end = Answer(message=message, finish=FinishReason.STOP, prompt_tokens=1, completion_tokens=2)
    writer = DIALECT.writer(head, request)
    stream = assembled(writer.open(1) + b"".join(writer.write([delta]) for delta in deltas) + writer.close(end))
    whole = json.loads(msgspec.json.encode(DIALECT.whole(head, request, end)))["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in stream["tool_calls"]] == [written for _, written in calls]
    for echo in (stream, whole):
        kept = {name: value for name, value in echo.items() if name != "finish_reason"}
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}, kept]}).encode()
        read = DIALECT.parse(body, strict=True)
        assert same_message(read.conversation.messages[1], message)
        assert read.warnings == ()
