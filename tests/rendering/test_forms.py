"""Every answer form: what it reads, by hand-derived cases; the same at every cut; certain; and never slow."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import InputError
from openforgerl.rendering.answers import Style
from openforgerl.rendering.forms import FORMS, choose_form
from openforgerl.rendering.schemas import types_of
from openforgerl.types import Message, MessageDelta, ToolSpec

from .speech import said

SCHEMA = {
    "command": {"type": "string"},
    "n": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "object"},
    "items": {"type": ["array", "null"]},
    "yes": {"type": "boolean"},
    "any": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "level": {"enum": ["low", "high"]},
}
TYPES = types_of((ToolSpec(name="bash", parameters={"type": "object", "properties": SCHEMA}),))
NAMES = [name for name in FORMS if name != "plain"]
Answer = tuple[str, str, list[tuple[str, str]]]


def style_of(form: str) -> Style:
    thought = ("[THINK]", "[/THINK]") if form.startswith("mistral") else ("<think>", "</think>")
    return Style(thinking=True, calls=True, thought=thought)


def read(form: str, pieces: list[str], *, calls: bool = True) -> tuple[Message, list[MessageDelta]]:
    style = style_of(form)
    style = Style(thinking=True, calls=calls, thought=style.thought)
    grammar = FORMS[form]().grammar(style, thought_open=False, seed="s", types=TYPES)
    deltas = [delta for piece in pieces for delta in grammar.write(piece)]
    last, message = grammar.end()
    return message, [*deltas, *last]


def answer_of(message: Message) -> Answer:
    return message.reasoning, message.text, [(call.name, call.arguments) for call in message.tool_calls]


def told(deltas: list[MessageDelta]) -> Answer:
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "call":
            calls.append([delta.text, ""])
        elif delta.kind == "arguments":
            assert delta.call_index == len(calls) - 1
            calls[-1][1] += delta.text
    reasoning = "".join(d.text for d in deltas if d.kind == "reasoning")
    return reasoning, "".join(d.text for d in deltas if d.kind == "text"), [(n, a) for n, a in calls]


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("odd", range(6))
def test_a_call_as_the_family_writes_it(form: str, odd: int) -> None:
    arguments = {"command": "echo 'a\n  b' \"x\" <y> {z}\n", "n": -3, "deep": {"k": [1, None, True, "é"]}, "yes": False}
    alone = form == "llama"
    text = said(form, "" if alone else "Look:", [("bash", arguments)], thought="Hm.", odd=odd)
    message, _ = read(form, [text])
    assert (message.reasoning, message.text) == ("Hm.", "" if alone else "Look:")
    ((name, told_arguments),) = [(call.name, call.arguments) for call in message.tool_calls]
    assert (name, json.loads(told_arguments)) == ("bash", arguments)


@pytest.mark.parametrize("form", [name for name in NAMES if name not in ("llama", "harmony")])
def test_two_calls_in_one_turn(form: str) -> None:
    text = said(form, calls=[("bash", {"command": "a"}), ("look", {})])
    message, _ = read(form, [text])
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("bash", {"command": "a"}), ("look", {})]
    assert message.text == ""


@pytest.mark.parametrize("form", NAMES)
def test_without_tools_calls_are_text(form: str) -> None:
    text = said(form, calls=[("bash", {"command": "a"})])
    message, _ = read(form, [text], calls=False)
    assert message.tool_calls == ()
    assert message.text == ('{"command": "a"}' if form == "harmony" else text)


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("12", "n", "12"),
        (" 007 ", "n", "7"),
        ("twelve", "n", '"twelve"'),
        ("1.50", "share", "1.50"),
        ("1.", "share", "1"),
        ("nan", "share", '"nan"'),
        ("True", "yes", "true"),
        ("yes", "yes", '"yes"'),
        ('{"a":  1}', "deep", '{"a":  1}'),
        ("{'a': None}", "deep", '{"a": null}'),
        ("{broken", "deep", '"{broken"'),
        ("null", "items", "null"),
        ("None", "items", "null"),
        ("[1]", "items", "[1]"),
        ("null", "command", '"null"'),
        ("12", "command", '"12"'),
        ("12", "any", "12"),
        ("12a", "any", '"12a"'),
        ("low", "level", '"low"'),
        ("12", "unknown", '"12"'),
    ],
)
def test_values_follow_the_schema(written: str, key: str, value: str) -> None:
    text = f"<tool_call>\n<function=bash>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    message, _ = read("qwen-xml", [text])
    assert answer_of(message) == ("", "", [("bash", f'{{"{key}": {value}}}')])


def test_values_without_a_schema_are_json_where_the_family_reads_them_so() -> None:
    text = "<tool_call>bash\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for key, written, value in (
        ("unknown", "12", "12"),
        ("unknown", "{'a': 1}", '{"a": 1}'),
        ("unknown", "word", '"word"'),
        ("command", "12", '"12"'),
    ):
        assert answer_of(read("glm", [text.format(key, written)])[0])[2] == [("bash", f'{{"{key}": {value}}}')]


XML = "<tool_call>\n<function=bash>\n<parameter=command>\n"
MINIMAX = "x\n<minimax:tool_call>\n</minimax:tool_call>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # cut inside a value: cut JSON, so that no tool runs on half of it
        ("qwen-xml", XML + "rm -rf /tm", ("", "", [("bash", '{"command": "rm -rf /tm')])),
        ("qwen-xml", XML + "ls\n</parameter>\n", ("", "", [("bash", '{"command": "ls"')])),
        ("qwen-xml", XML + "ls\n</parameter>\n</tool_call>!", ("", "!", [("bash", '{"command": "ls"}')])),
        ("qwen-xml", "a\n<tool_call>\nls\n</tool_call>\nb", ("", "a\n<tool_call>\nls\n</tool_call>\nb", [])),
        ("qwen-xml", "<tool_call><function=look></function></tool_call>", ("", "", [("look", "{}")])),
        ("qwen-xml", "<think></think>\n\nhi", ("", "hi", [])),
        ("qwen-xml", "</think>\n\nhi", ("", "hi", [])),
        ("glm", "<tool_call>look</tool_call>", ("", "", [("look", "{}")])),
        ("glm", "<tool_call></tool_call>", ("", "<tool_call></tool_call>", [])),
        ("glm", "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>b", ("", "", [("look", '{"a": "b')])),
        (
            "minimax",
            "x\n<minimax:tool_call>\n</minimax:tool_call>",
            ("", "x\n<minimax:tool_call>\n</minimax:tool_call>", []),
        ),
        ("kimi", KIMI + "functions.a:0<|tool_call_argument_begin|>{} ", ("", "", [("a", "{}")])),
        ("kimi", KIMI + "a<|tool_call_argument_begin|>{bad<|tool_call_end|>", ("", "", [("a", "{bad")])),
        (
            "kimi",
            KIMI + 'a:1<|tool_call_argument_begin|>{"c":"<|tool_call_end|>"}<|tool_call_end|>!',
            ("", "", [("a", '{"c":"<|tool_call_end|>"}')]),
        ),
        ("kimi", "hi<|tool_calls_section_begin|>", ("", "hi<|tool_calls_section_begin|>", [])),
        ("deepseek-v3", V3 + "function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>", ("", "", [("a", "{}")])),
        ("deepseek-v3", V3 + "function<｜tool▁sep｜>a\n{}<｜tool▁call▁end｜>", ("", "", [("a", "{}")])),
        ("deepseek-v3", V3 + 'function<｜tool▁sep｜>a\n```json\n{"c": "l', ("", "", [("a", '{"c": "l')])),
        ("deepseek-v3.1", V3 + "function<｜tool▁sep｜>{}<｜tool▁call▁end｜>", ("", "", [("function", "{}")])),
        ("harmony", "hello", ("", "hello", [])),
        ("harmony", "<|channel|>final<|message|>hello", ("", "hello", [])),
        ("harmony", "<|channel|>analysis<|message|>why", ("why", "", [])),
        ("harmony", "<|channel|>final", ("", "", [])),
        ("harmony", "<|channel|>commentary to=python<|message|>1+1", ("", "", [("python", "1+1")])),
        ("llama", '{"name": "a", "parameters": {"c": "l', ("", "", [("a", '{"c": "l')])),
        ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', ("", "", [("a", "{}")])),
        ("llama", '{"parameters": {"x": 1}, "type": "function", "name": "a"}', ("", "", [("a", '{"x": 1}')])),
        ("llama", '{"answer": 42} it is', ("", '{"answer": 42} it is', [])),
        ("llama", " \n{not json", ("", " \n{not json", [])),
        ("llama", '<|python_tag|>print("x")', ("", '<|python_tag|>print("x")', [])),
        ("mistral", 'hi[TOOL_CALLS]a[ARGS]{"x": 1} and more', ("", "hi", [("a", '{"x": 1}')])),
        ("mistral", '[TOOL_CALLS]a{"x": 1}', ("", "", [("a", '{"x": 1}')])),
        ("mistral", "[TOOL_CALLS]a[ARGS]{bad[TOOL_CALLS]b[ARGS]{}", ("", "", [("a", "{bad"), ("b", "{}")])),
        ("mistral", "[TOOL_CALLS]a", ("", "[TOOL_CALLS]a", [])),
        ("mistral-list", '[TOOL_CALLS] [{"name": "a"}]', ("", "", [("a", "")])),
        ("mistral-list", "[TOOL_CALLS] [1]", ("", "[TOOL_CALLS] [1]", [])),
        ("mistral-list", '[TOOL_CALLS][{"name": "a", "argu', ("", '[TOOL_CALLS][{"name": "a", "argu', [])),
        ("plain", "<think>a</think><tool_call>", ("a", "<tool_call>", [])),
    ],
)
def test_rules(form: str, text: str, expected: Answer) -> None:
    assert answer_of(read(form, [text])[0]) == expected
    for cut in range(len(text) + 1):
        message, deltas = read(form, [text[:cut], text[cut:]])
        assert answer_of(message) == told(deltas) == expected


COMMON = [
    "<think>",
    "</think>",
    "\n",
    " ",
    "a",
    "b c",
    "{",
    "}",
    '"',
    "\\",
    "<",
    ">",
    "[",
    "]",
    "1",
    ",",
    ":",
    "é😀",
    "\x00",
]
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "x", "arguments": ', "{}", '"name"'],
    "qwen-xml": [
        "<tool_call>",
        "</tool_call>",
        "<function=bash>",
        "<function=",
        "</function>",
        "<parameter=n>",
        "<parameter=command>",
        "</parameter>",
        "</para",
        "=k>",
    ],
    "glm": ["<tool_call>", "</tool_call>", "bash", "<arg_key>", "n</arg_key>", "<arg_value>", "</arg_value>", "</arg_"],
    "minimax": [
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="bash">',
        "</invoke>",
        "</parameter>",
        '<parameter name="deep">',
        "</inv",
    ],
    "dsml": [
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="bash">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="false">',
        "</｜DSML｜parameter>",
        "<｜DSML｜",
    ],
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "bash\n",
        "```json\n",
        "```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁",
    ],
    "kimi": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.bash:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|tool_",
    ],
    "harmony": [
        "<|channel|>",
        "analysis",
        "final",
        "commentary to=functions.bash",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        " <|constrain|>json",
        "<|",
    ],
    "llama": ["<|python_tag|>", '{"name": "x"', ', "parameters": ', '{"a": 1}', "; ", "<|"],
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        '{"a": 1}',
        '[{"name": "x", "arguments": {}}]',
        "[THINK]",
        "[/THINK]",
        "[TOOL",
    ],
}
PIECES["deepseek-v3.1"], PIECES["mistral-list"] = PIECES["deepseek-v3"], PIECES["mistral"]


def answers(form: str) -> st.SearchStrategy[str]:
    own = st.sampled_from(PIECES[form])
    return st.lists(own | own | st.sampled_from(COMMON), max_size=12).map("".join)


@pytest.mark.parametrize("form", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_cut_gives_the_whole_and_deltas_are_certain(form: str, data: st.DataObject) -> None:
    text, more = data.draw(answers(form)), data.draw(answers(form))
    whole, deltas = read(form, [text])
    assert told(deltas) == answer_of(whole)
    for cut in range(len(text) + 1):
        message, deltas = read(form, [text[:cut], text[cut:]])
        assert message == whole
        assert told(deltas) == answer_of(whole)
    message, deltas = read(form, list(text))
    assert message == whole
    grammar = FORMS[form]().grammar(style_of(form), thought_open=False, seed="s", types=TYPES)
    early, late = told(list(grammar.write(text))), told(read(form, [text + more])[1])
    assert late[0].startswith(early[0])
    assert late[1].startswith(early[1])
    assert len(late[2]) >= len(early[2])
    for (name, arguments), (later_name, later_arguments) in zip(early[2], late[2], strict=False):
        assert name == later_name
        assert later_arguments.startswith(arguments)


STUCK = {
    "qwen-xml": ["<tool_call>", XML, "<tool_call><function="],
    "glm": ["<tool_call>", "<tool_call>bash\n<arg_key>a</arg_key>", "<tool_call>bash\n<arg_key>a</arg_key><arg_value>"],
    "minimax": ["<minimax:tool_call>", '<minimax:tool_call><invoke name="a">'],
    "kimi": ["<|tool_calls_section_begin|>", KIMI, KIMI + "a<|tool_call_argument_begin|>"],
    "deepseek-v3": ["<｜tool▁calls▁begin｜>", V3, V3 + "function<｜tool▁sep｜>a\n"],
    "harmony": ["<|channel|>", "<|channel|>final<|message|>"],
    "llama": ["{", '{"name": "a", "parameters":'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS]["],
}


@pytest.mark.parametrize(("form", "opening"), [(form, opening) for form, all_ in STUCK.items() for opening in all_])
@pytest.mark.parametrize("piece", ["    ", "x > <y"])
def test_a_block_that_goes_on_costs_what_is_new(form: str, opening: str, piece: str) -> None:
    grammar = FORMS[form]().grammar(style_of(form), thought_open=False, seed="s", types=TYPES)
    started = time.process_time()
    grammar.write(opening)
    for _ in range(4000):
        grammar.write(piece)
    grammar.end()
    assert time.process_time() - started < 2


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("name", ["bash", None])
def test_a_forced_opening_begins_a_call(form: str, name: str | None) -> None:
    chosen = FORMS[form]()
    before, middle, after = chosen.opening(name, 0)
    assert (before + middle + after).startswith(chosen.forced)
    rest: dict[str, Any] = {
        "qwen-xml": "<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm": "\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "minimax": '<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>',
        "dsml": '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter></｜DSML｜invoke>',
        "hermes": ' {"n": 1}}\n</tool_call>',
        "llama": ' {"n": 1}}',
        "mistral-list": ' {"n": 1}}]',
    }
    tail = rest.get(form, '{"n": 1}')
    if name is None:
        tail = {
            "qwen-xml": "bash>\n",
            "minimax": 'bash">',
            "dsml": 'bash">',
            "hermes": 'bash", "arguments":',
            "glm": "bash",
            "llama": 'bash", "parameters":',
            "mistral-list": 'bash", "arguments":',
            "mistral": "bash[ARGS]",
            "kimi": "bash:0<|tool_call_argument_begin|>",
            "deepseek-v3": "bash\n```json\n",
            "deepseek-v3.1": "bash<｜tool▁sep｜>",
            "harmony": "bash <|constrain|>json<|message|>",
        }[form] + tail
    message, _ = read(form, [before + middle + after + tail])
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("bash", {"n": 1})]


def test_forms_are_chosen_by_evidence_and_by_name() -> None:
    assert str(choose_form('{{ "<tool_call>" }} {"name": } </think>')) == (
        "hermes, thoughts in <think> (the template writes <tool_call>)"
    )
    assert choose_form("<tool_call><function=name>").form.name == "plain"
    assert choose_form("{{ message.content }}").style == Style(thinking=False, calls=False)
    assert str(choose_form("{{ message.content }}", "glm")) == "glm (named by the configuration)"
    with pytest.raises(InputError, match="answer form 'nope' is unknown; known are auto, hermes, qwen-xml"):
        choose_form("", "nope")
