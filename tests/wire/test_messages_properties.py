"""Whatever the policy writes, a client's echo is what we recorded."""

from __future__ import annotations

import json
import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.types import Conversation, FinishReason, MessageDelta
from openforgerl.wire import Answer, Head, MessageBuilder, MessagesDialect, Request

from .fuzzing import objects, texts, values
from .messages_client import Remembered, assembled, echo, events_of

DIALECT = MessagesDialect()
MODEST = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

names = st.text(string.ascii_letters + "_", min_size=1, max_size=8)


def cut(text: str, sizes: list[int]) -> list[str]:
    """`text` in pieces of these sizes, over and over."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces


@st.composite
def answers(draw: st.DrawFn) -> list[MessageDelta]:
    """An answer as the renderer tells it: a thought, then text and calls in any order, in pieces."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    deltas = [MessageDelta(kind="reasoning", text=piece) for piece in cut(draw(texts), sizes)]
    calls = 0
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            deltas += [MessageDelta(kind="text", text=piece) for piece in cut(draw(texts), sizes)]
            continue
        arguments = draw(
            objects.map(json.dumps)
            | objects.map(lambda value: json.dumps(value)[:-1])
            | values.map(json.dumps)
            | texts
            | st.sampled_from(["", "null", "nul", " null \n", "nullx", "{}", '{"a": 1} x', "\u00a0"])
        )
        deltas.append(MessageDelta(kind="call", text=draw(names), call_index=calls, call_id=f"call{calls}"))
        deltas += [MessageDelta(kind="arguments", text=piece, call_index=calls) for piece in cut(arguments, sizes)]
        calls += 1
    return deltas


@given(answers(), st.sampled_from(["summarized", "omitted"]), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
@MODEST
def test_the_echo_of_an_answer_is_what_was_recorded(
    deltas: list[MessageDelta], display: str, finish: FinishReason
) -> None:
    builder = MessageBuilder()
    builder.add(deltas)
    request = Request(
        dialect="messages",
        model="m",
        conversation=Conversation(messages=()),
        raw={"thinking": {"type": "adaptive", "display": display}},
    )
    head = Head(call_id="c", model="m", created=0, handle="ours")
    sent = DIALECT.sent(builder.message(), request)
    assert DIALECT.sent(sent, request) == sent
    end = Answer(message=sent, finish=finish, prompt_tokens=3, completion_tokens=4)
    writer = DIALECT.writer(head, request)
    stream = writer.open(3) + b"".join(writer.write([delta]) for delta in deltas) + writer.close(end)
    messages = [assembled(events_of([stream])), json.loads(json.dumps(DIALECT.whole(head, request, end)))]
    assert messages[0]["stop_reason"] == messages[1]["stop_reason"]
    for message in messages:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}, echo(message)]}).encode()
        read = DIALECT.parse(body, strict=True, memory=Remembered({"ours": sent.reasoning}))
        assert same_message(read.conversation.messages[1], sent)
        assert len(read.warnings) == 1  # that the answer will be a new turn
