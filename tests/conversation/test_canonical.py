"""Canonical equality, case by case of DESIGN §5; and its laws as properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.conversation import (
    MOST_NESTED,
    digest_json,
    digest_message,
    digest_outline,
    digest_tools,
    parse_arguments,
    same_message,
)
from openforgerl.types import Message, Reasoning, Role, Text, ToolCall, ToolSpec


def call(arguments: str, *, id: str = "call_1", name: str = "bash") -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id=id, name=name, arguments=arguments),))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a":1,"b":2}', '{"b": 2, "a": 1}'),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":0.0}', '{"a":-0.0}'),
        ('{"a":1e2}', '{"a":100}'),
        ('{"a":9007199254740993}', '{"a":9007199254740992}'),
        ('{"a":"\\u00e9"}', '{"a":"é"}'),
    ],
)
def test_equal_arguments(left: str, right: str) -> None:
    assert same_message(call(left), call(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a":1}', '{"a":true}'),
        ('{"a":0}', '{"a":false}'),
        ('{"a":null}', "{}"),
        ('{"a":[]}', "{}"),
        ('{"a":""}', "{}"),
        ('{"a":"x "}', '{"a":"x"}'),
        ('{"a":"é"}', '{"a":"e\\u0301"}'),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":"1"}', '{"a":1}'),
        ('{"a":1', '{"a": 1'),
        ("", "{}"),
        ("null", "{}"),
    ],
)
def test_different_arguments(left: str, right: str) -> None:
    assert not same_message(call(left), call(right))


def test_call_ids_compare_without_punctuation() -> None:
    assert same_message(call("{}", id="call_ab-12"), call("{}", id="callab12"))
    assert not same_message(call("{}", id="call_ab12"), call("{}", id="call_ab13"))


def test_absent_content_is_empty_content_but_nothing_is_trimmed() -> None:
    def said(*parts: str) -> Message:
        return Message(role=Role.ASSISTANT, parts=tuple(Text(text) for text in parts))

    assert same_message(said(), said(""))
    assert not same_message(said("a"), said("a "))
    assert not same_message(said("ab"), said("a", "b"))


def test_reasoning_counts_except_in_the_outline() -> None:
    thought = Message(role=Role.ASSISTANT, parts=(Reasoning("hm"), Text("4")))
    bare = Message(role=Role.ASSISTANT, parts=(Text("4"),))
    assert digest_message(thought) != digest_message(bare)
    assert digest_outline(thought) == digest_outline(bare)


def test_tool_order_counts_and_schema_key_order_does_not() -> None:
    one = ToolSpec(name="a", parameters={"type": "object", "required": ["x"]})
    same = ToolSpec(name="a", parameters={"required": ["x"], "type": "object"})
    two = ToolSpec(name="b")
    assert digest_tools((one, two)) == digest_tools((same, two))
    assert digest_tools((one, two)) != digest_tools((two, one))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.randoms(use_true_random=False))
def test_spelling_never_changes_a_digest(value: object, random: object) -> None:
    def shuffled(node: object) -> object:
        if isinstance(node, dict):
            keys = list(node)
            random.shuffle(keys)  # type: ignore[attr-defined]
            return {key: shuffled(node[key]) for key in keys}
        return [shuffled(item) for item in node] if isinstance(node, list) else node

    spelled = json.dumps(shuffled(value), ensure_ascii=True, indent=1)
    assert digest_json(json.loads(spelled)) == digest_json(value)


@given(json_values, json_values)
def test_different_values_have_different_digests(left: object, right: object) -> None:
    def plain(node: object) -> object:
        """Equality by the law, written another way: bool apart from numbers, numbers as doubles."""
        if isinstance(node, bool) or node is None or isinstance(node, str):
            return (type(node).__name__, node)
        if isinstance(node, int | float):
            return ("number", float(node))
        if isinstance(node, list):
            return ("list", tuple(plain(item) for item in node))
        assert isinstance(node, dict)
        return ("object", frozenset((key, plain(item)) for key, item in node.items()))

    assert (digest_json(left) == digest_json(right)) == (plain(left) == plain(right))


@pytest.mark.parametrize("levels", [MOST_NESTED + 1, 600, 3000, 100_000])
def test_arguments_nested_without_end_compare_by_bytes(levels: int) -> None:
    """A policy that repeats itself writes these; 600 levels survive msgspec, but no walk of ours."""
    deep = "[" * levels + "]" * levels
    assert parse_arguments(deep) is None
    assert same_message(call(deep), call(deep))
    assert not same_message(call(deep), call(" " + deep))


def test_arguments_within_the_levels_are_json() -> None:
    deep = "[" * MOST_NESTED + "]" * MOST_NESTED
    assert same_message(call(deep), call(" " + deep))
