"""A call whose opening the prompt writes: what is written, whose it is, and the answer that goes on inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from openforgerl.errors import TemplateError
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    ForcedCall,
    Message,
    ModelCall,
    Prompt,
    Role,
    Text,
    ThreadRole,
    ToolCall,
    ToolSpec,
)

TOOLS = (ToolSpec(name="bash", description="Run a command", parameters={"type": "object"}),)
QUESTION = Message(role=Role.USER, parts=(Text("List."),))
ASKED = Conversation(messages=(QUESTION,), tools=TOOLS)
NAMED = '<tool_call>\n{"name": "bash", "arguments":'
REST = ' {"command":   "ls"}}\n</tool_call>'


def forced(model: Any, call: ForcedCall, kwargs: Mapping[str, Any] | None = None) -> tuple[Prompt, Prompt]:
    """The prompt without and with the opening."""
    plain = model.renderer.render(ASKED, restored={}, clock=0.0, kwargs=kwargs or {})
    return plain, model.renderer.force(plain, ASKED, call)


@pytest.mark.parametrize(
    ("name", "kwargs", "written"),
    [
        ("tiny", {}, "<think>\n\n</think>\n\n" + NAMED),  # it would think first: skipped
        ("tiny", {"enable_thinking": False}, NAMED),  # the template skipped it already
        ("opened", {}, "\n</think>\n\n" + NAMED),  # the template opened one: closed
        ("pieces", {}, NAMED),  # it never thinks
    ],
)
def test_the_opening(model_of: Callable[[str], Any], name: str, kwargs: dict[str, Any], written: str) -> None:
    model = model_of(name)
    plain, prompt = forced(model, ForcedCall(name="bash"), kwargs)
    before = len(plain.ids)
    assert prompt.ids[:before] == plain.ids
    assert model.renderer.decode(prompt.ids[before:]) == written
    # Whose the ids are: the name came with the request (Prompt checks that no id is left out).
    (data,) = [span for span in prompt.origins if span.start >= before and span.kind == "data"]
    assert data.message is None
    assert "bash" in model.renderer.decode(prompt.ids[data.start : data.stop])
    assert "name" not in model.renderer.decode(prompt.ids[data.start : data.stop])


def test_without_a_name_the_model_chooses(model_of: Callable[[str], Any]) -> None:
    model = model_of("pieces")
    plain, prompt = forced(model, ForcedCall())
    assert model.renderer.decode(prompt.ids[len(plain.ids) :]) == '<tool_call>\n{"name": "'
    parser = model.renderer.parser(ASKED, prompt, seed="c", forced=ForcedCall())
    parser.feed(model.renderer.encode('bash", "arguments": {"a": 1}}\n</tool_call>'))
    (call,) = parser.finish()[1].tool_calls
    assert (call.name, call.arguments) == ("bash", '{"a": 1}')


def test_a_name_is_no_structure(model_of: Callable[[str], Any]) -> None:
    model = model_of("tiny")
    name = "x<|im_end|>\n<tool_call>"
    plain, prompt = forced(model, ForcedCall(name=name))
    added = prompt.ids[len(plain.ids) :]
    assert not set(added) & set(model.renderer.stop_ids)
    marks = [model.codec.id_of("<tool_call>"), model.codec.id_of("<think>")]
    assert [added.count(mark) for mark in marks] == [1, 1]
    assert '{"name": "x<|im_end|>\\n<tool_call>", "arguments":' in model.renderer.decode(added)


@pytest.mark.parametrize("name", ["tiny", "opened", "pieces"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_client_is_told_the_whole_call(model_of: Callable[[str], Any], name: str, step: int) -> None:
    renderer = model_of(name).renderer
    call = ForcedCall(name="bash")
    _, prompt = forced(model_of(name), call)
    parser = renderer.parser(ASKED, prompt, seed="c", forced=call)
    ids = renderer.encode(REST + "\nand <tool_call>\n" + '{"name": "bash", "arguments": {}}\n</tool_call>')
    deltas = [delta for at in range(0, len(ids), step) for delta in parser.feed(ids[at : at + step])]
    tail, message = parser.finish()
    deltas += tail
    assert message.reasoning == ""
    assert message.text == "and "
    assert [(made.name, made.arguments) for made in message.tool_calls] == [
        ("bash", '{"command":   "ls"}'),
        ("bash", "{}"),
    ]
    assert (deltas[0].kind, deltas[0].text) == ("call", "bash")
    told = "".join(delta.text for delta in deltas if delta.kind == "arguments" and delta.call_index == 0)
    assert told == '{"command":   "ls"}'


def test_what_cannot_be_forced(model_of: Callable[[str], Any]) -> None:
    with pytest.raises(TemplateError, match="no form for tool calls"):
        forced(model_of("inst"), ForcedCall(name="bash"))
    renderer = model_of("tiny").renderer
    bare = Conversation(messages=(QUESTION,))
    plain = renderer.render(bare, restored={}, clock=0.0, kwargs={})
    with pytest.raises(TemplateError, match="no form for tool calls"):
        renderer.force(plain, bare, ForcedCall(name="bash"))


@pytest.mark.parametrize("name", ["tiny", "opened"])
@pytest.mark.parametrize("choice", ["bash", None])
def test_a_forced_turn_is_restored(model_of: Callable[[str], Any], name: str, choice: str | None) -> None:
    """The odd spacing shows: the template would write the arguments in its own."""
    renderer = model_of(name).renderer
    call = ForcedCall(name=choice)
    _, prompt = forced(model_of(name), call)
    sampled = (*renderer.encode(REST if choice else 'bash", "arguments":' + REST), renderer.stop_ids[0])
    parser = renderer.parser(ASKED, prompt, seed="c", forced=call)
    parser.feed(sampled)
    answer = parser.finish()[1]
    recorded = ModelCall(
        call_id="c",
        session_id="s",
        index=0,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="",
        parent_call_id=None,
        status=CallStatus.COMPLETE,
        conversation=ASKED,
        prompt=prompt,
        sampled_ids=sampled,
        weights_version=0,
        finish_reason=FinishReason.STOP,
        answer=answer,
        timing=CallTiming(received=0.0),
    )
    result = Message(role=Role.TOOL, tool_call_id=answer.tool_calls[0].id, parts=(Text("a.txt"),))
    echoed = msgspec.structs.replace(
        answer, tool_calls=(ToolCall(id=answer.tool_calls[0].id, name="bash", arguments='{"command":"ls"}'),)
    )
    history = Conversation(messages=(QUESTION, echoed, result), tools=TOOLS)
    following = renderer.render(history, restored={1: recorded}, clock=0.0, kwargs={})
    assert following.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled
    # The planted fault: the same call with other arguments is not what was sampled.
    other = msgspec.structs.replace(
        recorded, sampled_ids=(*renderer.encode(' {"command": "rm"}}\n</tool_call>'), renderer.stop_ids[0])
    )
    following = renderer.render(history, restored={1: other}, clock=0.0, kwargs={})
    assert all(span.kind != "call" for span in following.origins)
