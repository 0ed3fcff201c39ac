"""Model directories: what is read, what wins, what is refused and how."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError, TemplateError
from openforgerl.rendering import load_renderer
from openforgerl.types import Conversation, Image, Message, Reasoning, Role, Text, ToolCall, ToolSpec

HELLO = Conversation(messages=(Message(role=Role.USER, parts=(Text("hello"),)),))


@pytest.fixture
def directory(tmp_path: Path, model_of: Callable[[str], Any]) -> Path:
    return Path(shutil.copytree(model_of("tiny").directory, tmp_path / "model"))


def rewrite(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))


def test_missing_files_are_named(directory: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        load_renderer(directory / "none")
    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"chat_template\.jinja is missing"):
        load_renderer(directory)
    rewrite(directory / "tokenizer_config.json", chat_template=template)
    assert load_renderer(directory).render(HELLO, restored={}, clock=0.0, kwargs={}).ids
    (directory / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        load_renderer(directory)


def test_broken_files_are_named(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json is not JSON"):
        load_renderer(directory)
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match="must hold a JSON object"):
        load_renderer(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(InputError, match="eos_token_id must be an integer"):
        load_renderer(directory)
    (directory / "generation_config.json").unlink()
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TemplateError, match="chat template, line 1"):
        load_renderer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "config.json"])
def test_a_file_that_is_no_text_is_named(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b'{"a": "caf\xe9"}')
    with pytest.raises(InputError, match=rf"{re.escape(str(directory / name))} is not UTF-8 \(byte 10: "):
        load_renderer(directory)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": 3}'),
        ("chat_template.jinja", "{% if %}"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}'),
        ("tokenizer_config.json", '{"chat_template": [3]}'),
    ],
)
def test_what_is_wrong_in_a_file_names_the_directory(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(str(directory))):
        load_renderer(directory)


def test_stop_ids(directory: Path, model_of: Callable[[str], Any]) -> None:
    reference = model_of("tiny").reference
    eos, pad = reference.eos_token_id, reference.pad_token_id
    start = reference.convert_tokens_to_ids("<|im_start|>")
    structure = sorted((start, pad))  # special tokens that no answer holds end it too, after the declared ones
    assert load_renderer(directory).stop_ids == (eos, *structure)
    rewrite(directory / "config.json", eos_token_id=pad)
    assert load_renderer(directory).stop_ids == (eos, pad, start)
    rewrite(directory / "generation_config.json", eos_token_id=[eos, 9])
    assert load_renderer(directory).stop_ids == (eos, 9, *structure)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="no end-of-turn token"):
        load_renderer(directory)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<nope>"}')
    with pytest.raises(InputError, match="'<nope>' is not in tokenizer"):
        load_renderer(directory)


def test_a_template_for_tools(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    rewrite(directory / "tokenizer_config.json", chat_template=named)
    renderer = load_renderer(directory)
    with_tools = Conversation(messages=HELLO.messages, tools=(ToolSpec(name="x"),))
    assert renderer.decode(renderer.render(HELLO, restored={}, clock=0.0, kwargs={}).ids) == "plain"
    assert renderer.decode(renderer.render(with_tools, restored={}, clock=0.0, kwargs={}).ids) == "tools"


def test_the_digest_names_everything_that_makes_ids(directory: Path) -> None:
    first = load_renderer(directory)
    assert load_renderer(directory).digest == first.digest
    prompts = [first.render(HELLO, restored={}, clock=0.0, kwargs=k) for k in ({}, {"enable_thinking": False})]
    assert prompts[0].template_digest != prompts[1].template_digest
    digests = {first.digest}
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    digests.add(load_renderer(directory).digest)
    rewrite(directory / "generation_config.json", eos_token_id=[9])
    digests.add(load_renderer(directory).digest)
    state = json.loads((directory / "tokenizer.json").read_text())
    state["added_tokens"].pop()
    (directory / "tokenizer.json").write_text(json.dumps(state))
    digests.add(load_renderer(directory).digest)
    assert len(digests) == 4


def test_tokens_that_only_the_configuration_adds(directory: Path) -> None:
    state = json.loads((directory / "tokenizer.json").read_text())
    gone = state["added_tokens"].pop()
    (directory / "tokenizer.json").write_text(json.dumps(state))
    entry = {key: value for key, value in gone.items() if key != "id"}
    rewrite(directory / "tokenizer_config.json", added_tokens_decoder={str(gone["id"]): entry})
    assert load_renderer(directory).encode(gone["content"]) == (gone["id"],)


@pytest.mark.parametrize("name", ["tiny", "opened", "pieces"])
@pytest.mark.parametrize(
    "message",
    [
        Message(role=Role.ASSISTANT, parts=(Text("hello world"),)),
        Message(role=Role.ASSISTANT),
        Message(role=Role.ASSISTANT, parts=(Text("a <|im_end|> b"),)),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="", name="bash", arguments='{"c": 1}'),)),
        Message(
            role=Role.ASSISTANT,
            parts=(Text("ok"),),
            tool_calls=(
                ToolCall(id="", name="bash", arguments='{"c": "</tool_call>"}'),
                ToolCall(id="", name="read", arguments="{}"),
            ),
        ),
        Message(role=Role.ASSISTANT, parts=(Reasoning("because"), Text("so"))),
    ],
)
def test_an_encoded_answer_parses_to_itself(name: str, message: Message, model_of: Callable[[str], Any]) -> None:
    if name == "pieces" and message.reasoning:
        return  # that template writes no thoughts
    renderer = model_of(name).renderer
    asked = Conversation(messages=HELLO.messages, tools=(ToolSpec(name="bash"),))
    prompt = renderer.render(asked, restored={}, clock=0.0, kwargs={})
    ids = renderer.encode_answer(message, asked)
    assert ids[-1] == renderer.stop_ids[0]
    assert renderer.stop_ids[0] not in ids[:-1]
    parser = renderer.parser(asked, prompt, seed="s")
    parser.feed(ids)
    answer = parser.finish()[1]
    assert (answer.reasoning, answer.text) == (message.reasoning, message.text)
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [(c.name, c.arguments) for c in message.tool_calls]
    # and the template writes the very same ids (`opened` opens a thought, `pieces` ends in its tools)
    whole = Conversation(
        messages=(*asked.messages, message, Message(role=Role.TOOL, parts=(Text("x"),))), tools=asked.tools
    )
    if name == "tiny":
        assert renderer.render(whole, restored={}, clock=0.0, kwargs={}).ids[: len(prompt.ids) + len(ids)] == (
            *prompt.ids,
            *ids,
        )


def test_an_image_is_refused_with_its_place(model_of: Callable[[str], Any]) -> None:
    picture = Message(role=Role.USER, parts=(Image("0" * 64, "image/png"),))
    with pytest.raises(TemplateError, match=r"messages\[1\] holds an image"):
        model_of("tiny").renderer.render(
            Conversation(messages=(*HELLO.messages, picture)), restored={}, clock=0.0, kwargs={}
        )


def test_tools_are_given_as_the_harness_wrote_them(model_of: Callable[[str], Any]) -> None:
    renderer = model_of("tiny").renderer
    raw = {"function": {"strict": True, "name": "b", "parameters": {"z": 1, "a": 2}}, "type": "function"}
    for tool, text in (
        (ToolSpec(name="b", raw=raw), json.dumps(raw)),
        (
            ToolSpec(name="b", description="d", parameters={"z": 1}),
            '{"type": "function", "function": {"name": "b", "description": "d", "parameters": {"z": 1}}}',
        ),
    ):
        conversation = Conversation(messages=HELLO.messages, tools=(tool,))
        shown = renderer.decode(renderer.render(conversation, restored={}, clock=0.0, kwargs={}).ids)
        assert f"\n{text}\n" in shown
