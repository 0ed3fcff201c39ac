"""The restoring rule: what was sampled comes back id by id, or the true rendering stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import parse_arguments, same_message
from openforgerl.rendering import ChatRenderer
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Part,
    Prompt,
    Reasoning,
    Role,
    Text,
    ThreadRole,
    ToolCall,
    ToolSpec,
)

TOOLS = (ToolSpec(name="bash", description="Run a command", parameters={"type": "object"}),)
SETTINGS = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def user(text: str) -> Message:
    return Message(role=Role.USER, parts=(Text(text),))


def result(of: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, tool_call_id=of.id, parts=(Text(text),))


def echo(message: Message) -> Message:
    """An assistant message as a harness sends it back: arguments written anew, without spaces."""
    calls: list[ToolCall] = []
    for call in message.tool_calls:
        value = parse_arguments(call.arguments)
        text = call.arguments if value is None else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        calls.append(ToolCall(id=call.id, name=call.name, arguments=text))
    return Message(role=Role.ASSISTANT, parts=message.parts, tool_calls=tuple(calls))


class Loop:
    """A harness, a proxy and an engine in three methods: asks, records, echoes."""

    def __init__(self, renderer: ChatRenderer, *messages: Message, kwargs: Mapping[str, Any] | None = None) -> None:
        self.renderer = renderer
        self.messages = list(messages)
        self.restored: dict[int, ModelCall] = {}
        self.calls: list[ModelCall] = []
        self.kwargs = dict(kwargs or {})

    def prompt(self, *, restored: Mapping[int, ModelCall] | None = None) -> Prompt:
        conversation = Conversation(messages=tuple(self.messages), tools=TOOLS)
        known = self.restored if restored is None else restored
        return self.renderer.render(conversation, restored=known, clock=0.0, kwargs=self.kwargs)

    def sample(
        self,
        ids: Sequence[int],
        finish: FinishReason = FinishReason.STOP,
        status: CallStatus = CallStatus.COMPLETE,
    ) -> ModelCall:
        """The engine answers the current prompt with `ids`; the harness takes the answer into its history."""
        conversation = Conversation(messages=tuple(self.messages), tools=TOOLS)
        prompt = self.prompt()
        call_id = f"c{len(self.calls)}"
        parser = self.renderer.parser(conversation, prompt, seed=call_id)
        parser.feed(ids)
        answer = parser.finish()[1]
        call = ModelCall(
            call_id=call_id,
            session_id="s",
            index=len(self.calls),
            dialect="chat",
            thread="main",
            role=ThreadRole.MAIN,
            role_evidence="first",
            parent_call_id=None,
            status=status,
            conversation=conversation,
            prompt=prompt,
            sampled_ids=tuple(ids),
            weights_version=0,
            finish_reason=finish,
            answer=answer,
            timing=CallTiming(received=0.0),
        )
        self.calls.append(call)
        self.restored[len(self.messages)] = call
        back = echo(answer)
        assert same_message(back, answer)
        self.messages.append(back)
        return call

    def say(self, text: str, *, stop: int | None = None, **more: Any) -> ModelCall:
        return self.sample([*self.renderer.encode(text), *([] if stop is None else [stop])], **more)


def extends(prompt: Prompt, call: ModelCall, *, without_stop: bool = False) -> bool:
    """Whether `prompt` continues exactly what the engine saw and sampled in `call`."""
    before = (*call.prompt.ids, *(call.sampled_ids[:-1] if without_stop else call.sampled_ids))
    return prompt.ids[: len(before)] == before


def oddly_encoded(renderer: ChatRenderer, text: str, cuts: Sequence[int]) -> list[int]:
    """Ids of `text` as no tokenizer writes them: encoded in pieces cut anywhere."""
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    ids = [i for a, b in pairwise(places) for i in renderer.encode(text[a:b])]
    return ids if renderer.decode(ids) == text else list(renderer.encode(text))


PROSE = st.lists(
    st.sampled_from(["a", "I will", " look", "  ", "é", "😀", ".", "{", '"', "\n", "two\nlines", "0", "<", "| "]),
    max_size=6,
).map("".join)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "path", "n"]), PROSE | st.integers(-3, 3) | st.floats(-1, 1) | st.none(), max_size=3
)


@st.composite
def answers(draw: st.DrawFn, *, thought: bool, opened: bool) -> str:
    """An answer as a model might write it: odd spacing around markers, odd JSON, maybe no text."""
    gap = st.sampled_from(["", "\n", "\n\n"])
    text = draw(PROSE).strip()
    if thought:
        inner = draw(gap) + (draw(PROSE).strip() or "hm") + draw(gap)
        text = ("" if opened else "<think>") + inner + "</think>" + draw(gap) + text
    elif opened:
        text = "</think>" + draw(gap) + text
    for _ in range(draw(st.integers(1, 2))):
        spacing = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :\t")]))
        arguments = json.dumps(draw(ARGUMENTS), separators=spacing, ensure_ascii=draw(st.booleans()))
        block = '{"name":"bash","arguments":%s}' if draw(st.booleans()) else ' {"arguments": %s, "name": "bash"}\n'
        text += draw(gap) + "<tool_call>" + draw(gap) + block % arguments + draw(gap) + "</tool_call>"
    return text + draw(gap)


@pytest.mark.parametrize("name", ["tiny", "opened"])
@SETTINGS
@given(data=st.data())
def test_a_tool_loop_is_restored_exactly(name: str, data: st.DataObject, model_of: Callable[[str], Any]) -> None:
    """However oddly each turn was sampled, the next prompt continues it id by id."""
    renderer: ChatRenderer = model_of(name).renderer
    loop = Loop(renderer, user("List the files"))
    for turn in range(3):
        text = data.draw(answers(thought=data.draw(st.booleans()), opened=name == "opened"), label=f"answer {turn}")
        ids = oddly_encoded(renderer, text, data.draw(st.lists(st.integers(0, 200), max_size=6)))
        call = loop.sample([*ids, renderer.stop_ids[0]])
        assert call.answer is not None
        for made in call.answer.tool_calls:
            loop.messages.append(result(made, data.draw(PROSE)))
        prompt = loop.prompt()
        assert extends(prompt, call)
        spans = {span.call_id: span for span in prompt.origins if span.kind == "call"}
        for earlier in loop.calls:
            span = spans[earlier.call_id]
            assert prompt.ids[span.start : span.stop] == earlier.sampled_ids
            assert prompt.ids[: span.start] == earlier.prompt.ids


def test_spacing_of_arguments_comes_back(model_of: Callable[[str], Any]) -> None:
    """`{"command":"ls"}` was sampled; the template would write a space; the space must not appear."""
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("go"))
    call = loop.say(
        '<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call>', stop=renderer.stop_ids[0]
    )
    loop.messages.append(result(loop.messages[-1].tool_calls[0], "a.txt"))
    assert extends(loop.prompt(), call)
    rest = renderer.decode(loop.prompt().ids[len(call.prompt.ids) + len(call.sampled_ids) :])
    assert rest == ("\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert not extends(loop.prompt(restored={}), call)
    assert '{"command": "ls"}' in renderer.decode(loop.prompt(restored={}).ids)


def test_a_skipped_thought_stays_in_the_prompt(model_of: Callable[[str], Any]) -> None:
    """`enable_thinking=false` writes an empty thought only before the newest answer; the restored turn keeps it."""
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("go"), kwargs={"enable_thinking": False})
    call = loop.say("hello", stop=renderer.stop_ids[0])
    loop.messages.append(user("and now?"))
    assert renderer.decode(call.prompt.ids).endswith("<think>\n\n</think>\n\n")
    assert extends(loop.prompt(), call)


def test_stripped_thoughts_start_a_branch(model_of: Callable[[str], Any]) -> None:
    """After a new user message the template drops earlier thoughts: true rendering from the first difference."""
    renderer: ChatRenderer = model_of("tiny").renderer
    stop = renderer.stop_ids[0]
    loop = Loop(renderer, user("one"))
    first = loop.say("<think>\nwhy\n</think>\n\nanswer", stop=stop)
    loop.messages.append(user("two"))
    prompt = loop.prompt()
    assert not extends(prompt, first)
    assert prompt == loop.prompt(restored={})
    common = next(
        i for i, (a, b) in enumerate(zip(prompt.ids, (*first.prompt.ids, *first.sampled_ids), strict=False)) if a != b
    )
    assert common == len(first.prompt.ids)  # the thought's first id is what the template no longer writes
    # the branch goes on: what is sampled on it is restored on it
    second = loop.say("<think>because</think>" + '<tool_call>{"name":"bash","arguments":{}}</tool_call>', stop=stop)
    loop.messages.append(result(loop.messages[-1].tool_calls[0], "x"))
    assert extends(loop.prompt(), second)
    assert [span.call_id for span in loop.prompt().origins if span.kind == "call"] == ["c1"]
    # and once its thought is dropped too, it also becomes data
    loop.messages.append(user("three"))
    assert loop.prompt() == loop.prompt(restored={})


def test_a_turn_without_a_thought_survives_a_new_question(model_of: Callable[[str], Any]) -> None:
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("one"))
    first = loop.say("plain\n", stop=renderer.stop_ids[0])
    loop.messages.append(user("two"))
    second = loop.say("again", stop=renderer.stop_ids[0])
    loop.messages.append(user("three"))
    assert extends(loop.prompt(), first)
    assert extends(loop.prompt(), second)


def test_an_earlier_difference_is_never_spliced_over(model_of: Callable[[str], Any]) -> None:
    """The second turn is kept by the template, but not what stood before it when it was sampled."""
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("one"))
    loop.say("first", stop=renderer.stop_ids[0])
    loop.messages.append(user("two"))
    odd = [*renderer.encode("sec"), *renderer.encode("ond")]
    second = loop.sample([*odd, renderer.stop_ids[0]])
    loop.messages[0] = user("ONE")  # the harness rewrote its history
    loop.messages.append(user("three"))
    assert loop.prompt() == loop.prompt(restored={})
    assert not extends(loop.prompt(), second)


def test_no_header_before_an_answer(model_of: Callable[[str], Any]) -> None:
    """`inst` writes tools before the last question only, so a new question starts a branch at the first one."""
    renderer: ChatRenderer = model_of("inst").renderer
    loop = Loop(renderer, user("one"))
    first = loop.sample([*oddly_encoded(renderer, "hello world", [3, 5]), renderer.stop_ids[0]])
    loop.messages.append(result(ToolCall(id="x", name="x", arguments=""), "42"))  # still the same question
    assert extends(loop.prompt(), first)
    loop.messages.append(user("two"))
    assert loop.prompt() == loop.prompt(restored={})


def test_only_delivered_endings_are_restored(model_of: Callable[[str], Any]) -> None:
    renderer: ChatRenderer = model_of("tiny").renderer
    for finish, status, restored in (
        (FinishReason.STOP, CallStatus.COMPLETE, True),
        (FinishReason.LENGTH, CallStatus.COMPLETE, True),
        (FinishReason.STOP_STRING, CallStatus.COMPLETE, False),
        (FinishReason.ABORTED, CallStatus.ABORTED, False),
        (FinishReason.ERROR, CallStatus.ERROR, False),
    ):
        loop = Loop(renderer, user("one"))
        ids = [*renderer.encode("hel"), *renderer.encode("lo")]
        assert tuple(ids) != renderer.encode("hello")
        call = loop.sample(ids, finish=finish, status=status)
        loop.messages.append(user("two"))
        assert extends(loop.prompt(), call) == restored, finish


def test_a_length_cut_gets_the_templates_closing(model_of: Callable[[str], Any]) -> None:
    renderer: ChatRenderer = model_of("tiny").renderer
    for text in ("cut he", "<think>\nstill thinki", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls'):
        loop = Loop(renderer, user("one"))
        call = loop.say(text, finish=FinishReason.LENGTH)
        answer = loop.messages[-1]
        for made in answer.tool_calls:
            loop.messages.append(result(made, "bad arguments"))
        if not answer.tool_calls and not answer.reasoning:
            loop.messages.append(user("go on"))
        if answer.reasoning:
            loop.messages.append(Message(role=Role.TOOL, parts=(Text("go on"),)))
        prompt = loop.prompt()
        assert extends(prompt, call), text
        closing = prompt.ids[len(call.prompt.ids) + len(call.sampled_ids) :]
        assert closing[0] == renderer.stop_ids[0]
        assert [s.kind for s in prompt.origins if s.start <= len(prompt.ids) - len(closing) < s.stop] == ["template"]


def test_another_stop_token_gives_way_to_the_templates(model_of: Callable[[str], Any]) -> None:
    """`<|endoftext|>` ended the answer, the template closes with `<|im_end|>`."""
    model = model_of("tiny")
    renderer = ChatRenderer(
        model.codec,
        {"default": model.template},
        special_tokens={},
        stop_ids=[*model.renderer.stop_ids, model.reference.pad_token_id],
        tokenizer_digest="t",
    )
    loop = Loop(renderer, user("one"))
    call = loop.say("hello", stop=model.reference.pad_token_id)
    loop.messages.append(user("two"))
    prompt = loop.prompt()
    assert extends(prompt, call, without_stop=True)
    assert prompt.ids[len(call.prompt.ids) + len(call.sampled_ids) - 1] == model.reference.eos_token_id


def test_a_sampled_control_token_ends_the_turn_and_a_spelled_one_is_text(model_of: Callable[[str], Any]) -> None:
    """The structural one never enters a prompt again: the template's own closing stands in its place."""
    model = model_of("tiny")
    renderer: ChatRenderer = model.renderer
    start = model.reference.convert_tokens_to_ids("<|im_start|>")
    assert start in renderer.stop_ids
    loop = Loop(renderer, user("one"))
    call = loop.sample([*renderer.encode("a "), start])
    loop.messages.append(user("two"))
    assert loop.messages[1].text == "a "
    prompt = loop.prompt()
    assert extends(prompt, call, without_stop=True)
    assert prompt.ids[len(call.prompt.ids) + len(call.sampled_ids) - 1] == model.reference.eos_token_id
    assert prompt.ids.count(start) == 5  # the template's: tools, three turns and the next answer's header
    loop = Loop(renderer, user("one"))
    spelled = [i for char in "<|im_start|>" for i in renderer.encode(char)]
    call = loop.sample([*renderer.encode("a "), *spelled, renderer.stop_ids[0]])
    loop.messages.append(user("two"))
    assert loop.messages[1].text == "a <|im_start|>"
    assert extends(loop.prompt(), call)


def test_what_an_engine_sampled_beyond_the_end_of_a_turn_is_never_restored(model_of: Callable[[str], Any]) -> None:
    """An engine that ignored the end: the turn is what came before it, as the template writes it."""
    model = model_of("tiny")
    renderer: ChatRenderer = model.renderer
    start = model.reference.convert_tokens_to_ids("<|im_start|>")
    loop = Loop(renderer, user("one"))
    call = loop.sample([*renderer.encode("a"), start, *renderer.encode("system\nobey"), renderer.stop_ids[0]])
    loop.messages.append(user("two"))
    assert loop.messages[1].text == "a"
    assert loop.prompt() == loop.prompt(restored={})
    assert not extends(loop.prompt(), call)


def test_a_template_that_changes_the_text_starts_a_branch(model_of: Callable[[str], Any]) -> None:
    """`opened` trims content: the trailing blank is part of what we sent, and the template does not keep it."""
    renderer: ChatRenderer = model_of("opened").renderer
    for text, kept in (("</think>hello", True), ("</think>hello ", False)):
        loop = Loop(renderer, user("one"))
        call = loop.say(text, stop=renderer.stop_ids[0])
        loop.messages.append(user("two"))
        assert extends(loop.prompt(), call) == kept
        if not kept:
            assert loop.prompt() == loop.prompt(restored={})


def test_condition_two_is_checked_here(model_of: Callable[[str], Any]) -> None:
    """A caller that hands over the wrong call gets the true rendering, not the wrong ids."""
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("one"))
    loop.say("hello", stop=renderer.stop_ids[0])
    loop.messages[-1] = Message(role=Role.ASSISTANT, parts=(Text("hallo"),))
    loop.messages.append(user("two"))
    assert loop.prompt() == loop.prompt(restored={})


MESSY = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<|im_start|>",
            "\n",
            " ",
            "a",
            '{"name": "x"',
            ', "arguments": {}}',
            "{",
            "}",
            '"',
            "é",
        ]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["tiny", "opened", "pieces"])
@SETTINGS
@given(first=MESSY, second=MESSY, cut=st.booleans(), spelled=st.booleans())
def test_restored_or_true_whatever_was_sampled(
    name: str, first: str, second: str, cut: bool, spelled: bool, model_of: Callable[[str], Any]
) -> None:
    """Any answers: each turn is exactly what was sampled or exactly what the template writes, never a mixture."""
    renderer: ChatRenderer = model_of(name).renderer
    loop = Loop(renderer, user("one"))
    for text in (first, second):
        ids = [i for c in text for i in renderer.encode(c)] if spelled else list(renderer.encode(text))
        if cut:
            loop.sample(ids, finish=FinishReason.LENGTH)
        else:
            loop.sample([*ids, renderer.stop_ids[0]])
        for made in loop.messages[-1].tool_calls:
            loop.messages.append(result(made, "ok"))
        if not loop.messages[-1].tool_calls:
            loop.messages.append(user("more"))
    prompt, plain = loop.prompt(), loop.prompt(restored={})
    used = [span for span in prompt.origins if span.kind == "call"]
    if not used:
        assert prompt.ids == plain.ids
    for span in used:
        call = next(call for call in loop.calls if call.call_id == span.call_id)
        shown = prompt.ids[span.start : span.stop]
        assert shown == call.sampled_ids[: len(shown)]
        assert len(shown) >= len(call.sampled_ids) - 1
        assert prompt.ids[: span.start] == call.prompt.ids
    last = used[-1].stop if used else 0
    tail = prompt.ids[last:]
    closing = tail if not used or tail[0] not in renderer.stop_ids else tail[1:]
    assert plain.ids[len(plain.ids) - len(closing) :] == closing


def test_parts_of_other_kinds_do_not_hide_a_turn(model_of: Callable[[str], Any]) -> None:
    """Reasoning that the harness drops from its echo: condition 1 fails at the caller's, so nothing is offered."""
    renderer: ChatRenderer = model_of("tiny").renderer
    loop = Loop(renderer, user("one"))
    call = loop.say("<think>a</think>b", stop=renderer.stop_ids[0])
    parts: tuple[Part, ...] = tuple(p for p in loop.messages[-1].parts if not isinstance(p, Reasoning))
    loop.messages[-1] = Message(role=Role.ASSISTANT, parts=parts)
    loop.messages.append(Message(role=Role.TOOL, parts=(Text("x"),)))
    assert loop.prompt() == loop.prompt(restored={})
    assert not extends(loop.prompt(), call)
