"""Real chat templates of model families: ids as transformers makes them, answers restored, structure safe."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError as JinjaError

from openforgerl.conversation import parse_arguments, same_message
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.types import (
    Conversation,
    ForcedCall,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolSpec,
)

from .conftest import byte_level
from .families import BY_NAME, FAMILIES, ROOT, Family
from .family_table import HEAD, Loop, row, said_by
from .speech import said

SETTINGS = settings(
    deadline=None,
    max_examples=15,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PRINTS_DATE = {"Llama 3.2": "%d %b %Y", "gpt-oss": "%Y-%m-%d"}
"""The templates that ask for the time, as read in them; Llama 3.1's and 3.3's have one date written into them."""
ALL = pytest.mark.parametrize("name", list(BY_NAME))
WORDS = ["hello", " world", "\n", " ", "é", "😀", "你好", "{", '"', "\\", "<", "|", "]", "ls -la", "0", "'", "\t", "|>"]
PLAIN = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
SOLID = PLAIN.map(lambda text: f"a{text}z")
"""Text that no template strips."""
PROPERTIES = {"command": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["command"]}
RAW = {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": SCHEMA}}
TOOLS = (ToolSpec(name="bash", raw=RAW),)
ARGUMENTS = st.fixed_dictionaries(
    {"command": PLAIN}, optional={"n": st.integers(-99, 99), "deep": st.dictionaries(st.sampled_from("ab"), PLAIN)}
)


class FrozenTime(datetime):
    """What transformers' `strftime_now` asks for the time."""

    at: ClassVar[float] = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> FrozenTime:
        """The frozen time, in UTC like our template clock unless a zone is given."""
        return cls.fromtimestamp(cls.at, tz or UTC)


@pytest.fixture(scope="session", autouse=True)
def frozen_time() -> Iterator[None]:
    """Templates that print a date print `FrozenTime.at` for transformers too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", FrozenTime)
        yield


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Family, ChatRenderer, Any]]:
    """A family, our renderer of it and the transformers tokenizer of it, made once each."""

    @cache
    def get(name: str) -> tuple[Family, ChatRenderer, Any]:
        from transformers import AutoTokenizer  # noqa: PLC0415  # slow to import

        family = BY_NAME[name]
        directory: Path = tmp_path_factory.mktemp("families") / "model"
        family.write(directory, byte_level([]))
        return family, load_renderer(directory), AutoTokenizer.from_pretrained(directory)

    return get


@st.composite
def loops(draw: st.DrawFn, text: st.SearchStrategy[str], *, beside: bool = True) -> Conversation:
    """A conversation in the order that every template takes; one call a turn, text beside it only if `beside`."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message(role=Role.SYSTEM, parts=(Text(draw(text)),)))
    for question in range(draw(st.integers(1, 2))):
        if question:
            reasoning = (Reasoning(draw(text)),) if draw(st.booleans()) else ()
            messages.append(Message(role=Role.ASSISTANT, parts=(*reasoning, Text(draw(text)))))
        messages.append(Message(role=Role.USER, parts=(Text(draw(text)),)))
        for index in range(draw(st.integers(0, 2))):
            call = ToolCall(id=f"call{index}abcd", name="bash", arguments=json.dumps(draw(ARGUMENTS)))
            parts = (Text(draw(text)),) if beside and draw(st.booleans()) else ()
            messages.append(Message(role=Role.ASSISTANT, parts=parts, tool_calls=(call,)))
            messages.append(Message(role=Role.TOOL, tool_call_id=call.id, parts=(Text(draw(text)),)))
    return Conversation(messages=tuple(messages), tools=TOOLS)


def as_users_write(conversation: Conversation, family: Family) -> list[dict[str, Any]]:
    """The conversation as somebody who has read this template would write it for transformers."""
    forms: list[dict[str, Any]] = []
    for message in conversation.messages:
        form: dict[str, Any] = {"role": message.role.value}
        if message.text or not message.tool_calls or family.no_content == "empty":
            form["content"] = message.text
        elif family.no_content == "null":
            form["content"] = None
        if message.reasoning:
            form["reasoning_content"] = form["thinking"] = message.reasoning
        if message.tool_calls:
            form["tool_calls"] = []
            for call in message.tool_calls:
                arguments = call.arguments if family.text_arguments else parse_arguments(call.arguments)
                function = {"name": call.name, "arguments": arguments}
                form["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        if message.role is Role.TOOL:
            form["tool_call_id"] = message.tool_call_id
        forms.append(form)
    return forms


def reference_text(reference: Any, family: Family, conversation: Conversation) -> str:
    """What transformers renders; where its door drops `content: null`, what its compiled template renders."""
    forms = as_users_write(conversation, family)
    if family.no_content != "null":
        return reference.apply_chat_template(forms, tools=[RAW], add_generation_prompt=True, tokenize=False)
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

    compiled = _compile_jinja_template(reference.chat_template)
    special = reference.special_tokens_map
    return compiled.render(messages=forms, tools=[RAW], documents=None, add_generation_prompt=True, **special)


@ALL
def test_what_is_found_out_about_the_template(name: str, family_of: Callable[[str], Any]) -> None:
    """The form by evidence, the shape of messages, and the tokens that end a turn: as read off the template by hand."""
    family, renderer, reference = family_of(name)
    assert renderer.answer_form.split(" ")[0].rstrip(",") == family.form
    probed = renderer.probed
    assert (probed.shape.no_content, probed.shape.text_arguments) == (family.no_content, family.text_arguments)
    assert probed.shape.short_ids == (family.name in ("Mistral Nemo", "Mistral Small 3.2"))
    ends = {reference.convert_ids_to_tokens(i) for i in renderer.stop_ids}
    assert {family.eos, *family.also_stops} <= ends
    assert ends & set(family.openers.split()) == set(family.openers.split())
    assert not ends & set(family.marks.split())


@ALL
@SETTINGS
@given(data=st.data())
def test_ids_equal_transformers(name: str, data: st.DataObject, family_of: Callable[[str], Any]) -> None:
    family, renderer, reference = family_of(name)
    conversation = data.draw(loops(SOLID, beside=family.form != "harmony"))
    clock = FrozenTime.at = data.draw(st.floats(0, 4e9))
    try:
        text = reference_text(reference, family, conversation)
    except JinjaError as error:
        pytest.fail(f"{name}: transformers refuses what every template should take: {error}")
    prompt = renderer.render(conversation, restored={}, clock=clock, kwargs={})
    assert renderer.decode(prompt.ids) == text
    assert list(prompt.ids) == reference(text, add_special_tokens=False)["input_ids"]
    if name in PRINTS_DATE:
        assert FrozenTime.now().strftime(PRINTS_DATE[name]) in text


@ALL
@SETTINGS
@given(data=st.data())
def test_data_is_never_structure(name: str, data: st.DataObject, family_of: Callable[[str], Any]) -> None:
    """Whatever added tokens data spells, the structural ids are those of the same conversation without them."""
    family, renderer, _ = family_of(name)
    added = [*family.special.split(), *family.plain.split()]
    hostile = st.lists(st.sampled_from(added) | st.sampled_from(WORDS), min_size=1, max_size=4).map(
        lambda parts: f"a{''.join(parts)}z"
    )
    if family.form == "harmony":  # its template refuses channel tags in an assistant's text
        hostile = hostile.map(lambda text: text.replace("<|channel|>", "<|start|>"))
    conversation = data.draw(loops(hostile, beside=False))
    prompt = renderer.render(conversation, restored={}, clock=0.0, kwargs={})
    ids = {renderer.encode(text)[0] for text in added}
    assert all(len(renderer.encode(text)) == 1 for text in added)
    for span in prompt.origins:
        if span.kind == "data":
            assert not ids & set(prompt.ids[span.start : span.stop])
    harmless = renderer.render(_broken_up(conversation, added), restored={}, clock=0.0, kwargs={})
    assert Counter(i for i in prompt.ids if i in ids) == Counter(i for i in harmless.ids if i in ids)


def _broken_up(conversation: Conversation, added: list[str]) -> Conversation:
    def safe(text: str) -> str:
        for token in added:
            text = text.replace(token, "x")
        return text

    def change(message: Message) -> Message:
        parts = tuple(type(part)(safe(part.text)) for part in message.parts if isinstance(part, Text | Reasoning))
        return Message(role=message.role, parts=parts, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id)

    return Conversation(messages=tuple(map(change, conversation.messages)), tools=conversation.tools)


@ALL
@SETTINGS
@given(data=st.data())
def test_a_tool_loop_comes_back_id_by_id(name: str, data: st.DataObject, family_of: Callable[[str], Any]) -> None:
    """However oddly an answer was spaced and tokenised: what the template keeps is restored, all of it or none."""
    family, renderer, _ = family_of(name)
    loop = Loop(renderer, TOOLS, data.draw(SOLID))
    for _ in range(min(3, family.turns_of_a_loop)):
        odd = data.draw(st.integers(0, 5))
        thought = data.draw(SOLID) if data.draw(st.booleans()) and family.loop_keeps_thoughts else ""
        text = said_by(family, loop, thought=thought, calls=[("bash", data.draw(ARGUMENTS))], odd=odd)
        call = loop.answer(_oddly(renderer, text, data.draw(st.lists(st.integers(0, 200), max_size=5))), family)
        assert call.answer is not None
        assert [made.name for made in call.answer.tool_calls] == ["bash"]
        loop.results(data.draw(SOLID))
        prompt = loop.prompt()
        assert prompt.ids[: len(call.prompt.ids) + len(call.sampled_ids) - 1] == call.prompt.ids + call.sampled_ids[:-1]
        for span in prompt.origins:
            if span.kind == "call":
                made = next(c for c in loop.calls if c.call_id == span.call_id)
                shown = prompt.ids[span.start : span.stop]
                assert shown in (made.sampled_ids, made.sampled_ids[:-1])
                assert prompt.ids[: span.start] == made.prompt.ids


def _oddly(renderer: ChatRenderer, text: str, cuts: list[int]) -> list[int]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    ids = [i for a, b in pairwise(places) for i in renderer.encode(text[a:b])]
    return ids if renderer.decode(ids) == text else list(renderer.encode(text))


@ALL
@SETTINGS
@given(data=st.data())
def test_restored_or_true_whatever_was_sampled(name: str, data: st.DataObject, family_of: Callable[[str], Any]) -> None:
    """Any mixture of the family's marks: every turn is exactly what was sampled or exactly what the template writes."""
    family, renderer, _ = family_of(name)
    marks = [mark for mark in family.marks.split() if mark != "<|call|>"]
    pieces = st.sampled_from(
        [*(marks or ["x"]), *WORDS, "bash", '{"name": "bash", "arguments": {}}', "<function=bash>"]
    )
    loop = Loop(renderer, TOOLS, "go")
    for _ in range(2):
        text = "".join(data.draw(st.lists(pieces, max_size=7)))
        loop.answer(list(renderer.encode(text)), family)
        loop.results("ok")
        loop.ask("more")
    try:
        prompt, plain = loop.prompt(), loop.prompt(restored={})
    except Exception as error:  # the template refuses the answer itself
        assert type(error).__name__ == "TemplateError"
        return
    used = [span for span in prompt.origins if span.kind == "call"]
    if not used:
        assert prompt.ids == plain.ids
    for span in used:
        made = next(call for call in loop.calls if call.call_id == span.call_id)
        assert prompt.ids[span.start : span.stop] in (made.sampled_ids, made.sampled_ids[:-1])
        assert prompt.ids[: span.start] == made.prompt.ids


@ALL
def test_what_an_answer_is_encoded_to_parses_to_it(name: str, family_of: Callable[[str], Any]) -> None:
    family, renderer, _ = family_of(name)
    arguments = {"command": 'echo "a"\n  b\n', "n": 3, "deep": {"k": [1, None, True]}}
    conversation = Conversation(messages=(Message(role=Role.USER, parts=(Text("go"),)),), tools=TOOLS)
    prompt = renderer.render(conversation, restored={}, clock=0.0, kwargs={})
    for message in (
        Message(role=Role.ASSISTANT, parts=(Text("Done."),)),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="a", name="bash", arguments=json.dumps(arguments)),)),
    ):
        ids = renderer.encode_answer(message, conversation)
        assert ids[-1] in renderer.stop_ids
        assert not set(ids[:-1]) & set(renderer.stop_ids)
        parser = renderer.parser(conversation, prompt, seed="s")
        parser.feed(ids)
        found = parser.finish()[1]
        calls = tuple(ToolCall(id="a", name=call.name, arguments=call.arguments) for call in found.tool_calls)
        assert same_message(Message(role=Role.ASSISTANT, parts=found.parts, tool_calls=calls), message)
        if message.tool_calls and family.after_calls:
            assert renderer.decode(ids[-1:]) == family.after_calls


@ALL
def test_a_forced_call_is_restored(name: str, family_of: Callable[[str], Any]) -> None:
    family, renderer, _ = family_of(name)
    loop = Loop(renderer, TOOLS, "go")
    forced = ForcedCall(name="bash")
    prompt = renderer.force(loop.prompt(), loop.conversation(), forced)
    opening = renderer.decode(prompt.ids[len(loop.prompt().ids) :])
    whole = said(family.form, calls=[("bash", {"command": "ls"})], odd=0 if family.form != "harmony" else 1)
    rest = whole.lstrip("\n").partition("bash")[2]
    assert "bash" in opening
    begun = opening.rpartition("bash")[2].strip("\n")
    rest = rest[rest.index(begun) + len(begun) :] if begun and begun in rest else rest
    rest = rest.lstrip("\n") if opening.endswith("\n") else rest
    call = loop.answer(list(renderer.encode(rest)), family, prompt=prompt, forced=forced)
    assert call.answer is not None
    assert [(made.name, json.loads(made.arguments)) for made in call.answer.tool_calls] == [("bash", {"command": "ls"})]
    loop.results("a.txt")
    following = loop.prompt()
    assert following.ids[: len(prompt.ids) + len(call.sampled_ids) - 1] == prompt.ids + call.sampled_ids[:-1]


def test_the_document_says_what_is_measured(family_of: Callable[[str], Any]) -> None:
    measured = HEAD + "".join(row(*family_of(name)[:2]) for name in BY_NAME)
    path = ROOT / "docs/model-families.md"
    before, start, rest = path.read_text("utf-8").partition("<!-- measured -->\n")
    _, stop, after = rest.partition("<!-- end -->\n")
    if os.environ.get("OPENFORGERL_WRITE_DOCS"):
        path.write_text(before + start + measured + stop + after, "utf-8")
    assert path.read_text("utf-8") == before + start + measured + stop + after
    assert len(BY_NAME) == len(FAMILIES)
