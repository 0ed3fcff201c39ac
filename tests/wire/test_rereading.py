"""A session's history is read once. That saves time and changes nothing: every body reads as it would alone."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.errors import WireError
from openforgerl.types import Message, Role
from openforgerl.wire import ChatDialect, Dialect, GeminiDialect, MessagesDialect, ResponsesDialect
from openforgerl.wire.notes import Notes
from openforgerl.wire.rereading import MOST_BYTES, MOST_ITEMS, Rereading

from .messages_client import Remembered

TEXTS = st.sampled_from(["a", "b", "", "\N{SNOWMAN}", '"}],"x":[{"', "\ud800"])
KEYS = st.sampled_from(["a", "cache_control", "odd"])


def with_extras(item: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return {**item, **extra}


EXTRAS = st.dictionaries(KEYS, st.sampled_from([None, 1, True, 1.0]), max_size=1)
CHAT = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system", "developer"]), TEXTS
    ),
    st.builds(lambda text: {"role": "assistant", "content": text, "reasoning": text}, TEXTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": text}]}, TEXTS),
    st.just({"role": "assistant", "reasoning": 3, "content": "said"}),
    st.just({"role": "nobody"}),
)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(
        lambda text: {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": "HANDLE"}]},
        TEXTS,
    ),
    st.builds(
        lambda text: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": text}]}, TEXTS
    ),
)
IDS = st.sampled_from([None, "msg_c1_0", "fc_c2_0"])
RESPONSES = st.one_of(
    st.builds(
        lambda role, text, given: {"type": "message", "role": role, "content": text, "id": given},
        st.sampled_from(["user", "assistant", "developer"]),
        TEXTS,
        IDS,
    ),
    st.builds(
        lambda text, given: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text, "id": given},
        TEXTS,
        IDS,
    ),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, TEXTS),
    st.just({"type": "reasoning", "encrypted_content": "HANDLE", "summary": []}),
    st.just({"type": "web_search_call"}),
)
CALL = {"functionCall": {"name": "f", "args": {}}}
RESULT = {"functionResponse": {"name": "f", "response": {"output": "x"}}}
GEMINI = st.builds(
    lambda role, parts: {"role": role, "parts": parts},
    st.sampled_from(["user", "model", "function"]),
    st.lists(st.sampled_from([{"text": "a"}, {"text": "b"}, CALL, RESULT]), min_size=1, max_size=3),
)
DIALECTS: list[tuple[Dialect, str, Any]] = [
    (ChatDialect(), "messages", CHAT),
    (MessagesDialect(), "messages", MESSAGES),
    (ResponsesDialect(), "input", RESPONSES),
    (GeminiDialect(), "contents", GEMINI),
]


def understood(dialect: Dialect, body: bytes, memory: Remembered, *, strict: bool) -> Any:
    """All that comes of a body, or how it is refused."""
    try:
        request = dialect.parse(body, memory=memory, strict=strict)
    except WireError as error:
        return error.status, error.param, str(error)
    return request, json.dumps(request.raw)


@pytest.mark.parametrize(("dialect", "field", "items"), DIALECTS, ids=lambda value: getattr(value, "name", ""))
@given(data=st.data())
def test_a_body_reads_as_it_would_alone(dialect: Dialect, field: str, items: Any, data: st.DataObject) -> None:
    thoughts: dict[str, str] = {}
    memory = Remembered(thoughts)
    history: list[dict[str, Any]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        cut = data.draw(st.integers(0, len(history)))
        more = data.draw(st.lists(st.builds(with_extras, items, EXTRAS), max_size=3))
        history = [*history[:cut], *more]
        strict = data.draw(st.booleans())
        body = json.dumps({field: history, "tools": [], "model": "m"}).encode()
        if data.draw(st.booleans()):
            thoughts["HANDLE"] = "thought"  # given out in the meantime
        alone = Remembered(thoughts)
        assert understood(dialect, body, memory, strict=strict) == understood(dialect, body, alone, strict=strict)


def test_items_that_come_again_are_the_same_objects() -> None:
    memory = Remembered({})
    first = ChatDialect().parse(b'{"messages": [{"role": "user", "content": "a"}]}', memory=memory)
    second = ChatDialect().parse(
        b'{"messages": [{"role": "user", "content": "a"}, {"content": "a", "role": "user"}]}', memory=memory
    )
    assert second.raw["messages"][0] is first.raw["messages"][0]
    assert second.conversation.messages[0] is first.conversation.messages[0]
    assert list(second.raw["messages"][1]) == ["content", "role"]  # equal, but other bytes


def test_equal_values_of_other_types_are_told_apart() -> None:
    rereading = Rereading()
    for text in ("1", "true", "1.0"):
        value, _, held = rereading.decode(b'{"messages": [{"a": %s}]}' % text.encode())
        rereading.keep(held)
        assert json.dumps(value["messages"][0]["a"]) == text


def test_an_item_that_was_worth_a_warning_warns_every_time() -> None:
    memory = Remembered({})
    body = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "reasoning": 3}]}).encode()
    warnings = [ChatDialect().parse(body, memory=memory).warnings for _ in range(2)]
    assert warnings[0] == warnings[1] == ("messages[1].reasoning is a number and was left out of the prompt",)


def nested(levels: int) -> bytes:
    """A body so many levels deep: itself, the list, the message, and lists."""
    lists = levels - 3
    item = b'{"role": "user", "x": ' + b"[" * lists + b"]" * lists + b', "content": "q"}'
    return b'{"messages": [' + item + b"]}"


def test_depth_counts_from_the_body_whether_items_are_new_or_known() -> None:
    memory = Remembered({})
    for _ in range(2):
        assert ChatDialect().parse(nested(128), memory=memory).unlisted == ("messages[].x",)
    for _ in range(2):
        with pytest.raises(WireError, match="too deeply"):
            ChatDialect().parse(nested(129), memory=memory)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": "\xff", "messages": [{"role": "user", "content": "q"}]}',
        b'{"messages": [{"role": "user", "content": 1e999}]}',
        b'{"messages": [{"role": "user"},]}',
        b'[{"messages": []}]',
        b"",
        b"nul",
    ],
)
def test_what_is_no_body_is_refused_in_the_same_words(body: bytes) -> None:
    memory = Remembered({})
    found = understood(ChatDialect(), body, memory, strict=False)
    assert isinstance(found[0], int) and found[0] == 400
    assert memory.rereading.decode(b'{"messages": []}')[2] == {}


def test_a_session_holds_the_items_of_its_last_bodies_only() -> None:
    rereading = Rereading()
    bodies = [msgspec.json.encode({"messages": [{"role": "user", "content": str(at)}]}) for at in range(6)]
    for body in bodies:
        rereading.keep(rereading.decode(body)[2])
    new = [rereading.decode(body)[1] for body in bodies]
    assert [body["messages"] == [] for body in new] == [False, False, True, True, True, True]


def test_messages_read_before_are_not_read_again() -> None:
    """Counted, because nothing else would tell: the saving is what this is for."""
    rereading, read = Rereading(), list[int]()

    def read_one(at: int, item: Any, notes: Any) -> list[Message]:
        read.append(at)
        return [Message(role=Role.USER)]

    for count in (2, 3, 3):
        body = json.dumps({"messages": [{"content": at} for at in range(count)]}).encode()
        value, _, held = rereading.decode(body)
        rereading.keep(held)
        assert len(rereading.messages(value["messages"], "chat", Notes(), read_one)) == count
    assert read == [0, 1, 2]


def items_of(count: int, size: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": f"{at}" + "x" * size} for at in range(count)]}).encode()


@pytest.mark.parametrize(
    ("body", "held"),
    [(items_of(3, 10), True), (items_of(MOST_ITEMS + 1, 0), False), (items_of(2, MOST_BYTES // 2), False)],
    ids=["small", "many-items", "many-bytes"],
)
def test_what_an_agent_sends_is_held_only_while_it_is_small(body: bytes, held: bool) -> None:
    """Its items, its messages and its list: the count of references tells."""
    memory = Remembered({})
    requests = [ChatDialect().parse(body, memory=memory) for _ in range(2)]
    assert requests[0].conversation == requests[1].conversation
    first = [request.conversation.messages[0] for request in requests]
    assert (first[0] is first[1]) is held
    last = requests[1].raw["messages"][-1]
    del requests, first
    # One reference is ours, one is the call's: what else is there is a session's memory.
    gc.collect()
    assert (sys.getrefcount(last) > 2) is held
