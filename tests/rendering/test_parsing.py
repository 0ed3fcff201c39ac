"""Sampled ids to messages: the rules of `hermes`, one by one, and the same result at every cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.rendering.answers import END_THINK, THINK, Style, tool_call_id
from openforgerl.rendering.hermes import HermesGrammar
from openforgerl.rendering.parsing import opens_thought
from openforgerl.types import Conversation, Message, MessageDelta, OriginSpan, Prompt, Role, Text, ToolSpec

FULL = Style(thinking=True, calls=True)
SEED = "call-7"
THOUGHT = (THINK, END_THINK)
Answer = tuple[str, str, list[tuple[str, str]]]


def message_of(text: str, style: Style = FULL, *, thought_open: bool = False) -> Message:
    grammar = HermesGrammar(style, thought_open=thought_open, seed=SEED)
    grammar.write(text)
    return grammar.end()[1]


def answer_of(text: str, style: Style = FULL, *, thought_open: bool = False) -> Answer:
    """Reasoning, text, and (name, arguments) of every call."""
    message = message_of(text, style, thought_open=thought_open)
    return message.reasoning, message.text, [(call.name, call.arguments) for call in message.tool_calls]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NUMBER_NAME = '<tool_call>{"name": 3, "arguments": {}}</tool_call>'
SURROGATE_NAME = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("hello\n", ("", "hello\n", [])),
        ("  hello ", ("", "  hello ", [])),
        ("<think>\nwhy\n</think>\n\nhello", ("why", "hello", [])),
        ("\n <think>why</think>hello", ("why", "hello", [])),
        ("<think>\n\n a \n\n b \n\n</think>\n \nx", (" a \n\n b ", " \nx", [])),
        ("<think>\n\n</think>\n\nhello", ("", "hello", [])),
        ("<think>\nnever closed\n", ("never closed", "", [])),
        ("<think>\n<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [])),
        ("<thin", ("", "<thin", [])),
        ("<thinking>", ("", "<thinking>", [])),
        ("a <think>b</think>", ("", "a <think>b</think>", [])),
        ("late</think>x", ("", "late</think>x", [])),
        (call("bash", '{"command":"ls"}'), ("", "", [("bash", '{"command":"ls"}')])),
        ("ok\n\n" + call("bash", '{ "a" :1 }') + "\n", ("", "ok", [("bash", '{ "a" :1 }')])),
        (
            "<think>\nx\n</think>\n\n" + call("a", "{}") + "\n" + call("b", '{"k":[1,{"z":"}"}]}'),
            ("x", "", [("a", "{}"), ("b", '{"k":[1,{"z":"}"}]}')]),
        ),
        ("one\n" + call("a", "{}") + "\ntwo\n", ("", "onetwo\n", [("a", "{}")])),
        ('<tool_call>{"name":"a","arguments":{}}</tool_call>', ("", "", [("a", "{}")])),
        # the end marker inside a JSON string is the string's
        (call("a", '{"c":"echo </tool_call> \\"}"}'), ("", "", [("a", '{"c":"echo </tool_call> \\"}"}')])),
        # other key order, extra keys, no arguments
        ('<tool_call>{"arguments": {"x": 1}, "name": "a", "id": 3}</tool_call>', ("", "", [("a", '{"x": 1}')])),
        ('<tool_call>{"name": "a", "arguments": {"x": 1}, "id": 3}</tool_call>!', ("", "!", [("a", '{"x": 1}')])),
        ('<tool_call>{"name": "a"}</tool_call>', ("", "", [("a", "")])),
        ('<tool_call>{"name": "a", "arguments": }</tool_call>', ("", "", [("a", "")])),
        ('<tool_call>{"name": "a", "arguments": "ls"}</tool_call>', ("", "", [("a", '"ls"')])),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', ("", "", [("a", "null")])),
        ('<tool_call>{"name": "\\u0061\\"", "arguments": 12 }</tool_call>', ("", "", [('a"', "12")])),
        # arguments that are not JSON keep their text
        (call("a", '{"c": 1,}'), ("", "", [("a", '{"c": 1,}')])),
        (call("a", '{"c": "open}'), ("", "", [("a", '{"c": "open}')])),
        (call("a", '{"c": "two\nlines"}'), ("", "", [("a", '{"c": "two\nlines"}')])),
        (call("a", '{"c": [1, 2'), ("", "", [("a", '{"c": [1, 2')])),
        # without a usable name a block is text, markers and newlines included
        ("x\n<tool_call>\n{}\n</tool_call>\ny", ("", "x\n<tool_call>\n{}\n</tool_call>\ny", [])),
        ('<tool_call>{"name": ""}</tool_call>', ("", '<tool_call>{"name": ""}</tool_call>', [])),
        (NUMBER_NAME, ("", NUMBER_NAME, [])),
        (SURROGATE_NAME, ("", SURROGATE_NAME, [])),
        ("<tool_call>ls</tool_call>" + call("a", "{}"), ("", "<tool_call>ls</tool_call>", [("a", "{}")])),
        # cut short
        ('<tool_call>\n{"na', ("", '<tool_call>\n{"na', [])),
        ('ok\n<tool_call>\n{"name": "a", "arguments": {"c": "l', ("", "ok", [("a", '{"c": "l')])),
        ('<tool_call>\n{"name": "a", "arguments": {"c": 1}}\n</tool_c', ("", "", [("a", '{"c": 1}')])),
        ('<tool_call>\n{"arguments": {}, "name": "a"}', ("", "", [("a", "{}")])),
        # a forgotten end marker
        (call("a", "{}").removesuffix("</tool_call>") + call("b", "{}"), ("", "", [("a", "{}"), ("b", "{}")])),
    ],
)
def test_rules(text: str, expected: Answer) -> None:
    assert answer_of(text) == expected
    for pieces in ([text[:cut], text[cut:]] for cut in range(len(text) + 1)):
        reasoning, said, calls = rebuilt(run(pieces, thought_open=False)[1])
        assert (reasoning, said, [(name, arguments) for _, name, arguments in calls]) == expected


def test_an_opened_thought() -> None:
    assert answer_of("why\n</think>\n\nhello", thought_open=True) == ("why", "hello", [])
    assert answer_of("cut while thinking", thought_open=True) == ("cut while thinking", "", [])
    assert answer_of("</think>x", thought_open=True) == ("", "x", [])


def test_styles() -> None:
    text = "<think>a</think>" + call("b", "{}")
    assert answer_of(text, Style(thinking=False, calls=True)) == ("", "<think>a</think>", [("b", "{}")])
    assert answer_of(text, Style(thinking=True, calls=False)) == ("a", call("b", "{}"), [])
    assert answer_of(text, Style(thinking=False, calls=False)) == ("", text, [])


def test_call_ids_are_alphanumeric_and_follow_the_seed() -> None:
    ids = [c.id for c in message_of(call("a", "{}") + call("a", "{}")).tool_calls]
    assert ids == [tool_call_id(SEED, 0), tool_call_id(SEED, 1)]
    assert len(set(ids)) == 2
    assert all(i.startswith("call") and len(i) == 28 and i.isalnum() for i in ids)
    assert tool_call_id("other", 0) != ids[0]


FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "</",
        "<",
        ">",
        "\n",
        "\n\n",
        " ",
        "a",
        "b c",
        "{",
        "}",
        '"',
        "\\",
        '\\"',
        '{"name": "x", "arguments": ',
        '{"arguments": {}, "name": "y"}',
        '{"c": "d"}',
        '"name"',
        ",",
        ":",
        "[",
        "]",
        "1",
        "null",
        call("bash", '{"command":"ls"}'),
        "\x00",
        "\u2028",
        "é😀",
        "\\u0041",
    ]
)
ANSWERS = st.lists(FRAGMENTS, max_size=12).map("".join)


def run(pieces: list[str], *, thought_open: bool) -> tuple[Message, list[MessageDelta]]:
    grammar = HermesGrammar(FULL, thought_open=thought_open, seed=SEED)
    deltas = [delta for piece in pieces for delta in grammar.write(piece)]
    last, message = grammar.end()
    return message, [*deltas, *last]


def rebuilt(deltas: list[MessageDelta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "call":
            assert delta.call_index == len(calls)
            calls.append([delta.call_id, delta.text, ""])
        elif delta.kind == "arguments":
            assert delta.call_index == len(calls) - 1
            calls[-1][2] += delta.text
    reasoning = "".join(d.text for d in deltas if d.kind == "reasoning")
    text = "".join(d.text for d in deltas if d.kind == "text")
    return reasoning, text, [(i, n, a) for i, n, a in calls]


@settings(max_examples=150, deadline=None)
@given(text=ANSWERS, thought_open=st.booleans())
def test_every_cut_gives_the_whole(text: str, thought_open: bool) -> None:
    whole, deltas = run([text], thought_open=thought_open)
    assert rebuilt(deltas) == (
        whole.reasoning,
        whole.text,
        [(c.id, c.name, c.arguments) for c in whole.tool_calls],
    )
    for cut in range(len(text) + 1):
        message, deltas = run([text[:cut], text[cut:]], thought_open=thought_open)
        assert message == whole
        assert rebuilt(deltas)[:2] == (whole.reasoning, whole.text)
    message, deltas = run(list(text), thought_open=thought_open)
    assert message == whole
    assert rebuilt(deltas) == (whole.reasoning, whole.text, [(c.id, c.name, c.arguments) for c in whole.tool_calls])


@settings(max_examples=150, deadline=None)
@given(text=ANSWERS, more=ANSWERS)
def test_deltas_are_certain(text: str, more: str) -> None:
    """What is delivered for a beginning is delivered the same whatever follows."""
    grammar = HermesGrammar(FULL, thought_open=False, seed=SEED)
    early = rebuilt(list(grammar.write(text)))
    late = rebuilt(run([text + more], thought_open=False)[1])
    assert late[0].startswith(early[0])
    assert late[1].startswith(early[1])
    for (i, n, a), (j, m, b) in zip(early[2], late[2], strict=False):
        assert (i, n) == (j, m)
        assert b.startswith(a)
    assert len(late[2]) >= len(early[2])


def test_arguments_stream_before_their_end() -> None:
    grammar = HermesGrammar(FULL, thought_open=False, seed=SEED)
    deltas = grammar.write('<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello')
    assert [(d.kind, d.text) for d in deltas] == [("call", "bash"), ("arguments", '{"command": "echo hello')]


ID_SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
TOOLS = (ToolSpec(name="bash", parameters={}),)
ASKED = Conversation(messages=(Message(role=Role.USER, parts=(Text("go"),)),), tools=TOOLS)


@pytest.mark.parametrize("name", ["tiny", "inst"])
@ID_SETTINGS
@given(data=st.data())
def test_ids_in_any_chunks(name: str, data: st.DataObject, model_of: Callable[[str], Any]) -> None:
    """Any ids at all, cut anywhere: characters of several ids, broken bytes, ids without a token."""
    renderer = model_of(name).renderer
    size = model_of(name).reference.vocab_size
    spelled = st.lists(FRAGMENTS, max_size=5).map(lambda texts: list(renderer.encode("".join(texts))))
    ids = data.draw(st.lists(st.integers(0, size + 20), max_size=12) | spelled)
    prompt = renderer.render(ASKED, restored={}, clock=0.0, kwargs={})

    def parsed(chunks: list[list[int]]) -> tuple[Message, Any]:
        parser = renderer.parser(ASKED, prompt, seed=SEED)
        deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
        last, message = parser.finish()
        return message, rebuilt([*deltas, *last])

    whole = parsed([ids])
    for cut in range(len(ids) + 1):
        assert parsed([ids[:cut], ids[cut:]]) == whole
    assert parsed([[i] for i in ids]) == whole


def test_characters_across_ids(model_of: Callable[[str], Any]) -> None:
    renderer = model_of("tiny").renderer
    ids = renderer.encode("\U0001f9ff")  # four bytes, never merged into one id
    assert len(ids) > 1
    prompt = renderer.render(ASKED, restored={}, clock=0.0, kwargs={})
    parser = renderer.parser(ASKED, prompt)
    assert [d for i in ids[:-1] for d in parser.feed([i])] == []
    assert [d.text for d in parser.feed(ids[-1:])] == ["\U0001f9ff"]
    broken = renderer.parser(ASKED, prompt)
    broken.feed(ids[:-1])
    assert broken.finish()[1].text == "\ufffd"


def test_stop_ids_are_not_shown(model_of: Callable[[str], Any]) -> None:
    renderer = model_of("tiny").renderer
    parser = renderer.parser(ASKED, renderer.render(ASKED, restored={}, clock=0.0, kwargs={}))
    parser.feed([*renderer.encode("done"), renderer.stop_ids[0]])
    assert parser.finish()[1] == Message(role=Role.ASSISTANT, parts=(Text("done"),))


def test_the_prompt_says_whether_a_thought_is_open(model_of: Callable[[str], Any]) -> None:
    assert opens_thought("<think>\n", THOUGHT)
    assert not opens_thought("<think>\n\n</think>\n\n", THOUGHT)
    assert not opens_thought("assistant\n", THOUGHT)
    renderer = model_of("opened").renderer
    prompt = renderer.render(ASKED, restored={}, clock=0.0, kwargs={})
    for known in (prompt, Prompt(ids=prompt.ids)):
        parser = renderer.parser(ASKED, known)
        parser.feed(renderer.encode("so</think>yes"))
        message = parser.finish()[1]
        assert (message.reasoning, message.text) == ("so", "yes")


def test_data_cannot_open_a_thought(model_of: Callable[[str], Any]) -> None:
    renderer = model_of("tiny").renderer
    data = renderer.encode("<think>")
    origins = (OriginSpan(start=0, stop=len(data), kind="data", message=0),)
    parser = renderer.parser(ASKED, Prompt(ids=data, origins=origins))
    parser.feed(renderer.encode("yes"))
    assert parser.finish()[1].text == "yes"


def test_no_tools_no_calls(model_of: Callable[[str], Any]) -> None:
    renderer = model_of("tiny").renderer
    alone = Conversation(messages=ASKED.messages)
    parser = renderer.parser(alone, renderer.render(alone, restored={}, clock=0.0, kwargs={}))
    parser.feed(renderer.encode(call("bash", "{}")))
    assert parser.finish()[1].text == call("bash", "{}")


@pytest.mark.parametrize("name", ["tiny", "opened", "pieces"])
@ID_SETTINGS
@given(arguments=st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers(), max_size=3))
def test_arguments_keep_their_bytes(name: str, arguments: dict[str, Any], model_of: Callable[[str], Any]) -> None:
    renderer = model_of(name).renderer
    text = json.dumps(arguments, separators=(" ,", ":  "), ensure_ascii=False)
    parser = renderer.parser(ASKED, Prompt(ids=(1,)))
    if name == "opened":  # NFC would change the text on its way in
        text = json.dumps(arguments, separators=(" ,", ":  "))
    parser.feed(renderer.encode(call("bash", text)))
    assert [c.arguments for c in parser.finish()[1].tool_calls] == [text]


@pytest.mark.parametrize("opening", ["<tool_call>", '<tool_call>\n{"name"', '<tool_call>{"name": "a", "arguments":'])
def test_a_block_that_never_begins_costs_what_is_new(opening: str) -> None:
    """A policy that repeats blanks inside a block must not stop the event loop; matched whole each time: minutes."""
    grammar = HermesGrammar(Style(thinking=True, calls=True), thought_open=False, seed="s")
    started = time.process_time()
    grammar.write(opening)
    for _ in range(8000):
        grammar.write("    ")
    grammar.write("x")
    _, message = grammar.end()
    assert time.process_time() - started < 2
    assert len(message.tool_calls) == (1 if opening.endswith(":") else 0)


def test_blanks_inside_arguments_cost_their_length() -> None:
    """Blanks may be the end of the arguments; looking for that end from each of them took minutes."""
    grammar = HermesGrammar(Style(thinking=True, calls=True), thought_open=False, seed="s")
    started = time.process_time()
    grammar.write('<tool_call>{"name": "a", "arguments": {"x": 1')
    deltas = grammar.write(" " * 200_000 + "x")
    assert time.process_time() - started < 2
    assert "".join(delta.text for delta in deltas if delta.kind == "arguments").endswith(" x")
