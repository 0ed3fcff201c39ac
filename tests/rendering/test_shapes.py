"""Conversations that a template refuses as they come: written in the shape and the order that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from openforgerl.errors import TemplateError
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.types import Conversation, Message, Reasoning, Role, Text, ToolCall, ToolSpec

from .conftest import byte_level
from .families import BY_NAME

TOOLS = (ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatRenderer]:
    @cache
    def get(name: str) -> ChatRenderer:
        directory = tmp_path_factory.mktemp("shapes") / "model"
        BY_NAME[name].write(directory, byte_level([]))
        return load_renderer(directory)

    return get


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, parts=(Text(text),))


def user(text: str) -> Message:
    return Message(role=Role.USER, parts=(Text(text),))


def says(text: str, *, thought: str = "", calls: tuple[ToolCall, ...] = ()) -> Message:
    parts: tuple[Any, ...] = ((Reasoning(thought),) if thought else ()) + ((Text(text),) if text else ())
    return Message(role=Role.ASSISTANT, parts=parts, tool_calls=calls)


def result(call: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, tool_call_id=call.id, parts=(Text(text),))


def shown(renderer: ChatRenderer, *messages: Message) -> str:
    conversation = Conversation(messages=messages, tools=TOOLS)
    return renderer.decode(renderer.render(conversation, restored={}, clock=0.0, kwargs={}).ids)


LS = ToolCall(id="toolu_01AbCdEfGh", name="bash", arguments='{"command": "ls"}')


def test_neighbours_of_one_role_are_one_message(renderer_of: Callable[[str], ChatRenderer]) -> None:
    mistral = renderer_of("Mistral Small 3.2")
    text = shown(
        mistral, system("A."), system("B."), user("one"), user("two"), says("three"), says("four"), user("five")
    )
    assert "[SYSTEM_PROMPT]A.\n\nB.[/SYSTEM_PROMPT]" in text
    assert "[INST]one\n\ntwo[/INST]three\n\nfour</s>" in text
    assert text.endswith("[INST]five[/INST]")
    # A template without such an order gets them as they are.
    assert "one<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in shown(renderer_of("Qwen 3"), user("one"), user("two"))


def test_a_late_system_message_is_a_users(renderer_of: Callable[[str], ChatRenderer]) -> None:
    text = shown(renderer_of("Qwen 3.5"), user("one"), says("two"), system("Be brief."), user("three"))
    assert "<|im_start|>user\nBe brief.\n\nthree<|im_end|>" in text
    assert "<|im_start|>system\nBe brief." not in text


def test_what_a_user_says_after_a_result_stands_at_its_end(renderer_of: Callable[[str], ChatRenderer]) -> None:
    text = shown(
        renderer_of("Mistral Small 3.2"), user("go"), says("", calls=(LS,)), result(LS, "a.txt"), user("Hurry.")
    )
    assert "[TOOL_CONTENT]a.txt\n\nHurry.[/TOOL_RESULTS]" in text


def test_an_empty_answer_is_left_out_only_where_it_must_be(renderer_of: Callable[[str], ChatRenderer]) -> None:
    text = shown(renderer_of("Ministral 3 Reasoning"), user("one"), says(""), user("two"))
    assert text.endswith("[INST]one\n\ntwo[/INST]")
    assert "<|im_start|>assistant\n<|im_end|>" in shown(renderer_of("Qwen 2.5"), user("one"), says(""), user("two"))


def test_ids_have_nine_characters_where_longer_ones_are_refused(renderer_of: Callable[[str], ChatRenderer]) -> None:
    other = ToolCall(id="Ab3dE6gH9", name="bash", arguments="{}")
    messages = (user("go"), says("", calls=(LS, other)), result(LS, "1"), result(other, "2"))
    text = shown(renderer_of("Mistral Small 3.2"), *messages)
    called = [part.partition("[ARGS]")[0] for part in text.split("[CALL_ID]")[1:]]
    answered = [part.partition("[TOOL_CONTENT]")[0] for part in text.split("[TOOL_RESULTS]")[1:]]
    assert called == answered
    assert called[1] == "Ab3dE6gH9"
    assert len(called[0]) == 9
    assert called[0].isalnum()
    assert LS.id not in text


def test_text_beside_a_thought_and_a_call(renderer_of: Callable[[str], ChatRenderer]) -> None:
    """gpt-oss' template takes one of both; nothing is lost."""
    messages = (user("go"), says("I look.", thought="Hm.", calls=(LS,)), result(LS, "a.txt"))
    text = shown(renderer_of("gpt-oss"), *messages)
    assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|><|start|>assistant to=functions.bash" in text


@pytest.mark.parametrize(("name", "written"), [("Qwen3-Coder", "<parameter=arguments>\n{bad\n"), ("Qwen 3", "{bad")])
def test_arguments_that_are_no_json(name: str, written: str, renderer_of: Callable[[str], ChatRenderer]) -> None:
    """A policy's broken call must not make every later request of its session fail."""
    call = ToolCall(id="a", name="bash", arguments="{bad")
    assert written in shown(renderer_of(name), user("go"), says("", calls=(call,)), result(call, "no JSON"))


def test_arguments_keep_their_spelling_where_they_are_text(renderer_of: Callable[[str], ChatRenderer]) -> None:
    call = ToolCall(id="a", name="bash", arguments='{ "command":"ls" }')
    messages = (user("go"), says("", calls=(call,)), result(call, "a.txt"))
    assert '```json\n{ "command":"ls" }\n```' in shown(renderer_of("DeepSeek V3"), *messages)
    assert json.dumps(json.loads(call.arguments)) in shown(renderer_of("Qwen 3"), *messages)


def test_a_refusal_that_stays_is_the_first(renderer_of: Callable[[str], ChatRenderer]) -> None:
    """Llama's template takes one call a turn; no order of roles changes that."""
    calls = (LS, ToolCall(id="b", name="bash", arguments="{}"))
    with pytest.raises(TemplateError, match="only supports single tool-calls at once"):
        shown(renderer_of("Llama 3.1"), user("go"), user("on"), says("", calls=calls))
