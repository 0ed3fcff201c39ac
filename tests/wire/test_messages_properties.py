"""Whatever the policy writes, a client's echo is what we recorded; whatever a client sends, an answer or a clear 400.

The long run of the second (100,000 bodies) is under its own marker: `pytest -m fuzz tests/wire`.
"""

from __future__ import annotations

import base64
import copy
import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.errors import WireError
from openforgerl.types import Conversation, FinishReason, Message, MessageDelta
from openforgerl.wire import Answer, Head, MessageBuilder, MessagesDialect, Request

from .messages_client import Remembered, assembled, echo, events_of

DIALECT = MessagesDialect()
MODEST = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
PARTS, PART = 20, 5_000
"""The long run, in parts that each have their own seed: 100,000."""

names = st.text(string.ascii_letters + "_", min_size=1, max_size=8)
texts = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=3)


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


def of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with these fields."""
    return st.fixed_dictionaries(fields)


def kinds(*words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words)


words = kinds("", "a", "h1", "é\n", "\U0001f600", "<|im_end|>")
anything = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 1.5, 10**30, "", "auto", "text", "none", [], {}, [[]], [None], {"type": "text"}]
    ),
    values,
)
sources = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()},
        {"type": "url", "url": "http://a"},
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
        "tools": st.lists(tools, max_size=2),
        "tool_choice": st.sampled_from([{"type": kind, "name": "a"} for kind in ("auto", "any", "tool", "none")]),
        "stream": st.booleans(),
        "max_tokens": st.integers(1, 9),
        "stop_sequences": st.lists(kinds("a", "b"), max_size=2),
        "thinking": st.sampled_from([{"type": "adaptive", "display": "omitted"}, {"type": "disabled"}]),
        "output_config": st.sampled_from([{"effort": "low"}, {"format": None}, {"format": {"type": "json_schema"}}]),
        "shiny": anything,
    },
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body as it should be, with up to two places gone or holding anything at all."""
    body = copy.deepcopy(draw(whole_bodies))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        found = places(body)
        if not found:
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(anything))  # the next change may reach into it
        else:
            del container[key]
    return body


raw_bodies = st.one_of(
    bodies().map(lambda body: json.dumps(body).encode()),
    bodies().map(lambda body: json.dumps(body).encode()),
    bodies().map(lambda body: json.dumps(body).encode()),
    anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30),
)


def check_answer_or_refusal(body: bytes, strict: bool) -> Request | None:
    """Parse; whatever is taken can be answered, and whatever is refused is told in the dialect's own shape."""
    try:
        request = DIALECT.parse(body, strict=strict, memory=Remembered({"a": "thought"}))
    except WireError as error:
        assert error.status == 400 == DIALECT.status(error)
        detail = DIALECT.error(error)["error"]
        assert detail["type"] == "invalid_request_error" and detail["message"]
        json.dumps(DIALECT.error(error))
        return None
    assert request.conversation.messages
    head = Head(call_id="c", model=request.model, created=0, handle="h")
    end = Answer(message=_SAID, finish=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
    writer = DIALECT.writer(head, request)
    stream = assembled(events_of([writer.open(1) + writer.write(_DELTAS) + writer.close(end)]))
    assert stream == json.loads(json.dumps(DIALECT.whole(head, request, end)))
    return request


_DELTAS = [MessageDelta(kind="reasoning", text="hm"), MessageDelta(kind="text", text="ok")]


def _said() -> Message:
    builder = MessageBuilder()
    builder.add(_DELTAS)
    return builder.message()


_SAID = _said()


@given(raw_bodies, st.booleans())
@QUICK
def test_any_body_is_taken_or_clearly_refused(body: bytes, strict: bool) -> None:
    check_answer_or_refusal(body, strict)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_any_of_many_bodies_is_taken_or_clearly_refused(part: int, request: pytest.FixtureRequest) -> None:
    if "fuzz" not in str(request.config.getoption("markexpr")):
        pytest.skip("100,000 bodies: run with -m fuzz")

    @seed(part)
    @settings(QUICK, max_examples=PART, database=None)
    @given(raw_bodies, st.booleans())
    def go(body: bytes, strict: bool) -> None:
        check_answer_or_refusal(body, strict)

    go()


def test_the_bodies_are_not_all_refused() -> None:
    """Else the two tests above would say little."""
    taken: list[bool] = []

    @settings(QUICK, max_examples=300, database=None)
    @given(raw_bodies)
    def go(body: bytes) -> None:
        taken.append(check_answer_or_refusal(body, False) is not None)

    go()
    assert 0.25 < sum(taken) / len(taken) < 0.75
