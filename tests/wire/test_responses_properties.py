"""Whatever the policy writes, a client's echo is what we recorded."""

from __future__ import annotations

import json
import re
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.types import FinishReason, MessageDelta

from .fuzzing import texts, values
from .responses_client import (
    DIALECT,
    HEAD,
    TOOLS,
    Remembered,
    answer_of,
    ask,
    call,
    done_items,
    events_of,
    grown_items,
    say,
    think,
    without_ids,
)

MODEST = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])

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


@MODEST
@given(answers(), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.integers(0, 10**6))
def test_an_echo_is_what_was_recorded(deltas: list[MessageDelta], finish: FinishReason, cut: int) -> None:
    request = ask(tools=TOOLS)
    answer = answer_of(deltas, request, finish)
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


@pytest.mark.parametrize("seen", [{"type": "custom_tool_call", "input": "other"}, {"type": "message", "text": "x"}])
def test_a_changed_echo_is_noticed(seen: dict[str, Any]) -> None:
    """The comparison above would not pass anything."""
    request = ask(tools=TOOLS)
    answer = answer_of([say("a"), *call(0, "apply_patch", '{"input": "b"}')], request, FinishReason.STOP)
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
