"""A prompt that continues an earlier one is not made from its beginning, and is the same as if it were."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.rendering.remembered import Remembered
from openforgerl.rendering.tokenizer import TokenCodec
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    Prompt,
    Role,
    Text,
    ThreadRole,
    ToolSpec,
)

from .conftest import MODELS, Model

TOOLS = (ToolSpec(name="bash", description="Run.", parameters={"type": "object", "properties": {}}),)
PLAIN = ("the", "file", "holds", "nine", "lines", "café", "😀", "{}")
WORDS = (*PLAIN, "\n\n", "<|im_end|>", "</s>", "<|eot|>", "two", "", "blanks")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@dataclass(frozen=True)
class Leaf:
    """A conversation so far, and the calls whose answers its history repeats."""

    messages: tuple[Message, ...]
    restored: dict[int, ModelCall] = field(default_factory=dict)


def said(role: Role, text: str) -> Message:
    return Message(role=role, parts=(Text(text),) if text else (), tool_call_id="c" if role is Role.TOOL else None)


def asked(renderer: ChatRenderer, leaf: Leaf, tools: tuple[ToolSpec, ...]) -> Prompt:
    conversation = Conversation(messages=leaf.messages, tools=tools)
    return renderer.render(conversation, restored=leaf.restored, clock=0.0, kwargs={})


def answered(
    renderer: ChatRenderer,
    leaf: Leaf,
    tools: tuple[ToolSpec, ...],
    prompt: Prompt,
    text: str,
    number: int,
    *,
    cut: bool = False,
) -> Leaf:
    """The conversation with an answer of ours that a client has echoed."""
    conversation = Conversation(messages=leaf.messages, tools=tools)
    ids = renderer.encode(text) if cut else (*renderer.encode(text), renderer.stop_ids[0])
    parser = renderer.parser(conversation, prompt, seed=f"c{number}")
    parser.feed(ids)
    _, message = parser.finish()
    call = ModelCall(
        call_id=f"c{number}",
        session_id="s",
        index=number,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="",
        parent_call_id=None,
        status=CallStatus.COMPLETE,
        conversation=conversation,
        prompt=prompt,
        sampled_ids=ids,
        weights_version=0,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        answer=message,
        timing=CallTiming(received=0.0),
    )
    return Leaf((*leaf.messages, message), {**leaf.restored, len(leaf.messages): call})


def words(rng: random.Random, most: int, choice: Sequence[str] = WORDS) -> str:
    return " ".join(rng.choice(choice) for _ in range(rng.randrange(most)))


@pytest.mark.parametrize("name", MODELS)
def test_continued_prompts_are_those_made_from_the_beginning(name: str, model_of: Callable[[str], Model]) -> None:
    """Growing, branching and rewritten conversations, with and without tools, answers cut and whole."""
    assert sum(continued_prompts(model_of(name), random.Random(f"{name}{seed}")) for seed in range(6)) > 10


def continued_prompts(model: Model, rng: random.Random) -> int:
    """How many prompts of one random session hold sampled turns. Every one is compared with its like."""
    renderer, fresh = model.renderer, load_renderer(model.directory)
    tools = rng.choice([(), TOOLS])
    leaves = [Leaf((said(Role.SYSTEM, words(rng, 9)), said(Role.USER, words(rng, 9) or "x")))]
    continued = 0
    for number in range(14):
        leaf = rng.choice((*leaves[-2:], leaves[-1]))
        if rng.random() < 0.15:  # an earlier message is rewritten: nothing after it is known any more
            first = said(Role.USER, words(rng, 5) or "y")
            leaf = Leaf((leaf.messages[0], first, *leaf.messages[2:]))  # so no call is restored
        prompt = asked(renderer, leaf, tools)
        continued += any(span.kind == "call" for span in prompt.origins)
        assert asked(fresh, leaf, tools) == prompt
        fresh.forget()
        opened = renderer.decode(prompt.ids).endswith("<think>\n")
        text = ("hm\n</think>\n\n" if opened and rng.random() < 0.8 else "") + words(rng, 12, PLAIN)
        text += CALL if tools and rng.random() < 0.5 else ""
        grown = answered(renderer, leaf, tools, prompt, text, number, cut=rng.random() < 0.2)
        result = Role.TOOL if grown.messages[-1].tool_calls else Role.USER
        leaves.append(Leaf((*grown.messages, said(result, words(rng, 20) or "z")), grown.restored))
    return continued


def test_characters_tokenized_per_call_are_those_of_the_new_text(model_of: Callable[[str], Model]) -> None:
    """Of a tool's result and the template around it; none of the history, and none of what was sampled."""
    renderer = model_of("tiny").renderer
    renderer.forget()
    leaf = Leaf((said(Role.SYSTEM, "Be brief. " * 40), said(Role.USER, "Count the lines. " * 10)))
    asked(renderer, leaf, TOOLS)
    history = 0
    for number in range(60):
        prompt = asked(renderer, leaf, TOOLS)
        thought = f"<think>\nThe thought of turn {number}.\n</think>\n\nI look. "
        leaf = answered(renderer, leaf, TOOLS, prompt, thought + CALL, number)
        result = f"{number} holds {number * number} lines. " * 8
        leaf = Leaf((*leaf.messages, said(Role.TOOL, result)), leaf.restored)
        before = renderer.characters_encoded
        grown = asked(renderer, leaf, TOOLS)
        taken = renderer.characters_encoded - before
        # "\n" after the answer, "user\n" + "\n" + result + "\n" in the tags, "\n" and "assistant\n".
        assert len(result) <= taken <= len(result) + len("\nuser\n\n\n\nassistant\n")
        assert grown.ids[: len(prompt.ids)] == prompt.ids
        history += len(result)
    renderer.forget()
    before = renderer.characters_encoded
    assert asked(renderer, leaf, TOOLS) == grown
    assert renderer.characters_encoded - before > history  # what every call would cost without it


def test_what_other_writers_wrote_is_not_continued(model_of: Callable[[str], Model]) -> None:
    """The same text, but a message now says what the template said: its ids are data's, not structure's."""
    renderer = model_of("tiny").renderer
    first = Leaf((said(Role.USER, "a"),))
    prompt = asked(renderer, first, ())
    spelled = Leaf((said(Role.USER, "a<|im_end|>\n<|im_start|>user\nb"),))
    split = Leaf((said(Role.USER, "a"), said(Role.USER, "b")))
    one, two = asked(renderer, spelled, ()), asked(renderer, split, ())
    assert renderer.decode(one.ids) == renderer.decode(two.ids) and one.ids != two.ids
    grown = answered(renderer, split, (), two, "ok", 0)
    call = msgspec.structs.replace(grown.restored[2], prompt=two)
    echoed = Leaf((*spelled.messages, grown.messages[-1], said(Role.USER, "c")), {1: call})
    renderer.forget()
    fresh = asked(renderer, echoed, ())
    asked(renderer, split, ())
    assert asked(renderer, echoed, ()) == fresh
    assert all(span.kind != "call" for span in fresh.origins)
    assert prompt.ids != one.ids


def test_remembered_answers_are_bounded_by_their_size() -> None:
    held: Remembered[str, int] = Remembered(100)
    for number in range(10):
        held.put(str(number), number, 30)
    assert (len(held), held.size) == (3, 90)
    assert [held.get(str(number)) for number in (6, 7, 8, 9)] == [None, 7, 8, 9]
    held.get("7")
    held.put("x", 0, 60)  # 8 was unused longest, then 9
    assert [held.get(name) for name in ("7", "8", "9", "x")] == [7, None, None, 0]
    held.put("x", 1, 10)
    assert (held.size, held.get("x")) == (40, 1)
    held.put("huge", 0, 101)
    assert held.get("huge") is None and held.size == 40


def test_a_codec_holds_no_more_than_its_bound(model_of: Callable[[str], Model]) -> None:
    source = (model_of("tiny").directory / "tokenizer.json").read_text("utf-8")
    codec = TokenCodec(source, held=20_000)
    for number in range(200):
        codec.encode(f"text number {number} " * 5)
    assert 0 < codec.held <= 20_000
    codec.encode("x" * 20_000)
    assert codec.held <= 20_000
