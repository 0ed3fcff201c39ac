"""Whatever the policy writes, a client's echo is what we recorded; whatever a client sends, an answer or a clear 400.

The long run of the second (100,000 bodies) is under its own marker: `pytest -m fuzz tests/wire`.
"""

from __future__ import annotations

import json
import re
import string
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.errors import WireError
from openforgerl.types import FinishReason, MessageDelta, Reasoning
from openforgerl.wire import Answer, Head, MessageBuilder, Request

from .responses_client import (
    DIALECT,
    TOOLS,
    Remembered,
    ask,
    call,
    done_items,
    events_of,
    grown_items,
    say,
    think,
    without_ids,
)

HEAD = Head(call_id="0123456789abcdef", model="policy", created=1_700_000_000, handle="Ab_-9")
MODEST = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
PARTS, PART = 50, 2_000
"""The long run, in parts that each have their own seed: 100,000."""

texts = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))

names = st.sampled_from(
    ["exec_command", "apply_patch", "multi_agent_v1__spawn_agent", "multi_agent_v1__note", "local_shell", "tool_search"]
) | st.text(string.ascii_letters + "_", min_size=1, max_size=8)
freeform = st.builds(
    lambda text, ascii_only: json.dumps({"input": text}, ensure_ascii=ascii_only), st.text(), st.booleans()
)
shell = st.fixed_dictionaries(
    {"command": st.lists(texts, max_size=3)},
    optional={
        "env": st.dictionaries(texts, texts, max_size=2),
        "timeout_ms": st.integers(0, 10**6) | st.none() | st.floats(0, 9),
        "user": texts | st.none(),
        "working_directory": texts,
        "other": texts,
    },
)
broken = st.builds(lambda text, at: text[: at % (len(text) + 1)], freeform | values.map(json.dumps), st.integers(0, 99))
arguments = freeform | shell.map(json.dumps) | values.map(json.dumps) | broken | texts


@st.composite
def answers(draw: st.DrawFn) -> list[MessageDelta]:
    """Deltas as a parser may give them out: thoughts, text and calls in any order, in any pieces."""
    deltas: list[MessageDelta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=5)):
        if kind == "call":
            whole, pieces = draw(arguments), []
            while whole:
                size = draw(st.integers(1, 6))
                pieces.append(whole[:size])
                whole = whole[size:]
            deltas += call(calls, draw(names), *pieces)
            calls += 1
        else:
            deltas += [(think if kind == "thought" else say)(text) for text in draw(st.lists(texts, max_size=3))]
    return deltas


def answered(deltas: list[MessageDelta], request: Request, finish: FinishReason) -> Answer:
    built = MessageBuilder()
    built.add(deltas)
    message = built.message()
    parts = tuple(Reasoning(part.text, HEAD.handle) if isinstance(part, Reasoning) else part for part in message.parts)
    sent = DIALECT.sent(msgspec.structs.replace(message, parts=parts), request)
    return Answer(message=sent, finish=finish, prompt_tokens=3, completion_tokens=5)


@MODEST
@given(answers(), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.integers(0, 10**6))
def test_an_echo_is_what_was_recorded(deltas: list[MessageDelta], finish: FinishReason, cut: int) -> None:
    request = ask(tools=TOOLS)
    answer = answered(deltas, request, finish)
    writer = DIALECT.writer(HEAD, request)
    data = writer.open(3) + b"".join(writer.write([delta]) for delta in deltas) + writer.close(answer)
    events = events_of(data, cut % (len(data) + 1))
    items = done_items(events)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == ("response.incomplete" if finish is FinishReason.LENGTH else "response.completed")
    assert events[-1]["response"]["output"] == items == grown_items(events)
    ids = [item["id"] for item in items]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[A-Za-z0-9_]+", item_id) for item_id in ids)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["id"]) for event in added] == list(enumerate(ids))

    memory = Remembered()
    memory.keep(HEAD, request, answer.message)
    whole = DIALECT.whole(HEAD, request, answer)["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    for echo in (items, whole, without_ids(items), without_ids(whole), references):
        question = {"role": "user", "content": "hi"}
        _, turn = ask(memory, input=[question, *echo], tools=TOOLS).conversation.messages
        assert same_message(turn, answer.message)
    *_, turn = ask(memory, previous_response_id=events[-1]["response"]["id"], input=[]).conversation.messages
    assert same_message(turn, answer.message)


small = st.sampled_from(["", "x", "call_1", "msg_1", "rs_0123456789abcdef", "resp_0123456789abcdef", "é😀"])
odd = leaves | st.lists(leaves, max_size=2) | st.dictionaries(small, leaves, max_size=2)


def mostly(good: st.SearchStrategy[Any], strange: st.SearchStrategy[Any] = odd) -> st.SearchStrategy[Any]:
    """`good` nine times in ten."""
    return st.integers(0, 9).flatmap(lambda number: good if number else strange)


either = mostly(small)
part = mostly(
    st.fixed_dictionaries(
        {"type": mostly(st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file", "x"]))},
        optional={
            "text": either,
            "refusal": either,
            "image_url": mostly(st.sampled_from(["data:image/png;base64,AAAA", "data:image/png;base64,A", "http://x"])),
            "extra": odd,
        },
    )
)
content = either | st.lists(part, max_size=3)
function = mostly(
    st.fixed_dictionaries(
        {
            "type": mostly(
                st.sampled_from(["function", "custom", "namespace", "local_shell", "tool_search", "web_search"])
            ),
            "name": mostly(st.sampled_from(["f", "g"])),
        },
        optional={
            "description": either,
            "parameters": mostly(st.just({"type": "object"})),
            "format": mostly(
                st.sampled_from([{"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": "x"}])
            ),
            "execution": mostly(st.sampled_from(["client", "server"])),
            "tools": mostly(st.lists(st.fixed_dictionaries({"type": st.just("function"), "name": small}), max_size=2)),
        },
    )
)
functions = mostly(st.lists(function, max_size=2))
kinds = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "item_reference",
    "agent_message",
    "web_search_call",
    "compaction",
    "never_heard_of",
]
item = st.fixed_dictionaries(
    {"type": mostly(st.sampled_from(kinds)), "call_id": either, "name": either, "content": content},
    optional={
        "id": either,
        "role": mostly(st.sampled_from(["user", "assistant", "developer", "system", "tool"])),
        "namespace": either,
        "arguments": either | shell,
        "input": either,
        "output": content,
        "action": mostly(st.just({"type": "exec", "command": ["ls"]})),
        "summary": odd,
        "encrypted_content": mostly(st.just(HEAD.handle)),
        "tools": functions,
        "status": either,
    },
)
plausible = st.builds(
    lambda role, said: {"role": role, "content": said}, st.sampled_from(["user", "assistant", "system"]), texts
)
bodies = st.fixed_dictionaries(
    {"input": mostly(st.lists(plausible | item, min_size=1, max_size=4) | texts)},
    optional={
        "model": either,
        "instructions": either,
        "previous_response_id": mostly(st.just("resp_0123456789abcdef"), either),
        "tools": functions,
        "tool_choice": mostly(
            st.sampled_from(["auto", "none", "required"]),
            st.fixed_dictionaries(
                {"type": st.sampled_from(["function", "custom", "allowed_tools", "local_shell", "x"])},
                optional={"name": small, "mode": st.just("auto"), "tools": functions},
            )
            | odd,
        ),
        "stream": mostly(st.booleans()),
        "max_output_tokens": mostly(st.integers(1, 9)),
        "temperature": mostly(st.floats(0, 2)),
        "text": mostly(st.just({"format": {"type": "text"}})),
        "include": odd,
        "background": mostly(st.just(False)),
        "whatever": odd,
    },
)
raw_bodies = (
    bodies.map(lambda body: json.dumps(body).encode())
    | values.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
)


def remembering() -> Remembered:
    memory = Remembered()
    request = ask(tools=TOOLS)
    deltas = [think("t"), say("s"), *call(0, "apply_patch", "p")]
    memory.keep(HEAD, request, answered(deltas, request, FinishReason.STOP).message)
    return memory


def check_answer_or_refusal(body: bytes, strict: bool) -> Request | None:
    """The request, after an answer was given to it, or None when it was refused as it should be."""
    try:
        request = DIALECT.parse(body, strict=strict, memory=remembering())
    except WireError as error:
        assert 400 <= error.status < 500
        assert error.message
        detail = DIALECT.error(error)["error"]
        assert set(detail) == {"message", "type", "param", "code"}
        json.dumps(detail)
        return None
    deltas = [say("a"), *call(0, "f", "{}"), *call(1, "local_shell", '{"command": []}')]
    answer = answered(deltas, request, FinishReason.STOP)
    writer = DIALECT.writer(HEAD, request)
    events = events_of(writer.open(1) + writer.write(deltas) + writer.close(answer))
    assert events[-1]["response"] == DIALECT.whole(HEAD, request, answer)
    return request


@QUICK
@given(raw_bodies, st.booleans())
def test_any_body_is_taken_or_clearly_refused(body: bytes, strict: bool) -> None:
    check_answer_or_refusal(body, strict)


@pytest.mark.fuzz
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
    @given(bodies.map(lambda body: json.dumps(body).encode()))
    def go(body: bytes) -> None:
        taken.append(check_answer_or_refusal(body, False) is not None)

    go()
    assert 60 < sum(taken) < 290


@pytest.mark.parametrize("seen", [{"type": "custom_tool_call", "input": "other"}, {"type": "message", "text": "x"}])
def test_a_changed_echo_is_noticed(seen: dict[str, Any]) -> None:
    """The comparison above would not pass anything."""
    request = ask(tools=TOOLS)
    answer = answered([say("a"), *call(0, "apply_patch", '{"input": "b"}')], request, FinishReason.STOP)
    items = DIALECT.whole(HEAD, request, answer)["output"]
    changed = [
        {"type": "message", "role": "assistant", "content": "x"}
        if "text" in seen and item["type"] == "message"
        else {**item, **seen}
        if item["type"] == seen["type"]
        else item
        for item in items
    ]
    (turn,) = ask(input=changed).conversation.messages
    assert changed != items and not same_message(turn, answer.message)
