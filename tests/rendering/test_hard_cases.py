"""Whole kinds of hard cases (docs/hard-cases.md) on the families' real templates, where no other test has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest

from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.trajectory import SamplePolicy, build, build_samples, check_exact
from openforgerl.types import Conversation, Message, ModelCall, Rollout, Source, Text, ToolCall, ToolSpec
from openforgerl.types import Role as R

from .conftest import byte_level
from .families import BY_NAME, Family
from .family_table import Loop, said_by

FamilyOf = Callable[[str], tuple[Family, ChatRenderer]]
SOME = ("Qwen 3", "Qwen3-Coder", "GLM 4.6", "DeepSeek V3.1", "Llama 3.2", "Mistral Nemo", "Kimi K2", "MiniMax M2")
UNSHOWN = {("DeepSeek V3.1", place) for place in ("description", "parameter", "value")} | {("Mistral Nemo", "system")}
"""What these templates leave out: V3.1's shows no tools, Nemo's shows the system prompt with a last user message."""
ROLLOUT = Rollout(
    rollout_id="r", run_id="run", task="t", task_digest="", harness="h", group_id="g", index=0, seed=0, purpose="train"
)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> FamilyOf:
    @cache
    def get(name: str) -> tuple[Family, ChatRenderer]:
        directory: Path = tmp_path_factory.mktemp("families") / "model"
        BY_NAME[name].write(directory, byte_level([]))
        return BY_NAME[name], load_renderer(directory)

    return get


def rendered(renderer: ChatRenderer, conversation: Conversation) -> Sequence[int]:
    return renderer.render(conversation, restored={}, clock=0.0, kwargs={}).ids


# -- A8: what spells structure is text, wherever it comes from


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "place", ["description", "parameter", "value", "arguments", "foreign answer", "result", "system"]
)
def test_structure_spelled_in_any_place_is_text(name: str, place: str, family_of: FamilyOf) -> None:
    """Schemas and echoed turns that are not the policy's own are data like any other."""
    family, renderer = family_of(name)
    added = [*family.special.split(), *family.plain.split()]
    ids = {renderer.encode(text)[0] for text in added}

    def conversation(token: str) -> Conversation:
        said = {key: f"a{token}z" if key == place else "abc" for key in
                ("description", "parameter", "value", "arguments", "foreign answer", "result", "system")}  # fmt: skip
        properties = {said["parameter"]: {"type": "string", "enum": [said["value"]]}}
        schema = {"type": "object", "properties": properties}
        function = {"name": "bash", "description": said["description"], "parameters": schema}
        raw = {"type": "function", "function": function}
        tool = ToolSpec(name="bash", description=said["description"], parameters=schema, raw=raw)
        call = ToolCall(id="call0abcd", name="bash", arguments=f'{{"command": "{said["arguments"]}"}}')
        return Conversation(
            messages=(
                Message(role=R.SYSTEM, parts=(Text(said["system"]),)),
                Message(role=R.USER, parts=(Text("Go."),)),
                Message(role=R.ASSISTANT, parts=(Text(said["foreign answer"]),)),
                Message(role=R.USER, parts=(Text("On."),)),
                Message(role=R.ASSISTANT, tool_calls=(call,)),
                Message(role=R.TOOL, tool_call_id=call.id, parts=(Text(said["result"]),)),
            ),
            tools=(tool,),
        )

    expected = Counter(i for i in rendered(renderer, conversation("x")) if i in ids)
    for token in added:
        if token in ("<think>", "</think>", "[THINK]", "[/THINK]") and place == "foreign answer":
            continue  # templates split an answer's text there: what is a thought is left out, not made structure
        found = rendered(renderer, conversation(token))
        assert Counter(i for i in found if i in ids) == expected, token
        assert (f"a{token}z" in renderer.decode(found)) != ((name, place) in UNSHOWN), token


# -- A15, A14: what is sampled, and what stands between turns

EDGES = ["Done.", "Done.\n", "Done.\n\n", "Done. ", " Done.", "\nDone.", "\n\nDone.", "\t", "\n", " ", "é", "😀\n"]
PANTOM = ((53122, 316), (393, 30002))
"""Two ways in which Qwen's vocabulary writes ' Pantom' (rllm PR#272)."""


def trained(calls: Sequence[ModelCall]) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Rows of a session of these calls in a row, each with its trained stretches; checked against the calls."""
    linked = [
        msgspec.structs.replace(call, parent_call_id=None if index == 0 else calls[index - 1].call_id)
        for index, call in enumerate(calls)
    ]
    tree = build("a", linked)
    made = build_samples(tree, rollout=ROLLOUT, source=Source.TEACHER, policy=SamplePolicy())
    for sample in made.samples:
        check_exact(sample, {call.call_id: call for call in linked})
    return [
        (sample.ids, [(span.start, span.stop) for span in sample.spans if span.state == "trained"])
        for sample in made.samples
    ]


@pytest.mark.parametrize("edge", EDGES)
def test_the_newline_behind_an_answer_is_the_templates_and_never_trained(edge: str, family_of: FamilyOf) -> None:
    """Qwen's template writes <|im_end|> and a newline (id 198): the first is sampled, the second is not."""
    family, renderer = family_of("Qwen 3")
    loop = Loop(renderer, (), "Go.")
    for _ in range(3):
        loop.answer(renderer.encode(said_by(family, loop, text=edge)), family)
        loop.ask("On.")
    asked = loop.prompt().ids
    rows = trained(loop.calls)
    exact = [row for row in rows if row[0][: len(loop.calls[0].prompt.ids)] == loop.calls[0].prompt.ids]
    assert exact
    for ids, spans in rows:
        for start, stop in spans:
            assert any(ids[start:stop] == call.sampled_ids for call in loop.calls)
            assert ids[stop - 1] == renderer.encode("<|im_end|>")[0]
            assert stop == len(ids) or ids[stop] == 198  # context: no span holds it
            assert not any(a <= stop < b for a, b in spans)
    for call in loop.calls:  # whole or not at all: no turn is spliced together
        whole = call.prompt.ids + call.sampled_ids
        if asked[: len(whole)] == whole:
            assert asked[len(whole)] == 198
    assert sum(stop - start for _, spans in rows for start, stop in spans) == sum(
        len(call.sampled_ids) for call in loop.calls
    )


def test_another_encoding_of_the_same_text_is_trained_as_it_was_sampled(family_of: FamilyOf) -> None:
    family, renderer = family_of("Qwen 3")
    assert [renderer.decode(ids) for ids in PANTOM] == [" Pantom", " Pantom"]
    canonical = renderer.encode(" Pantom")
    (odd,) = [ids for ids in PANTOM if ids != canonical] if canonical in PANTOM else PANTOM[:1]
    loop = Loop(renderer, (), "Go.")
    for _ in range(3):
        before = renderer.encode(said_by(family, loop, text="Hello"))
        loop.answer([*before, *odd], family)
        loop.ask("On.")
    ((ids, spans),) = trained(loop.calls)
    assert [ids[start:stop][-3:-1] for start, stop in spans] == [odd] * 3
    assert renderer.encode(renderer.decode(ids)) != ids  # what re-tokenising the text would have trained on


# -- A40: BOS


@pytest.mark.parametrize(
    "name", ["Llama 3.1", "Llama 3.2", "Mistral Nemo", "DeepSeek V3.1", "DeepSeek R1 Distill Qwen"]
)
@pytest.mark.parametrize("data", ["Go.", "{bos}", "{bos}{bos} Go.", "Go. {bos}"])
def test_bos_stands_once_whatever_data_spells(name: str, data: str, family_of: FamilyOf) -> None:
    """Also where the tokenizer itself would add another, as Llama's real one does."""
    family, renderer = family_of(name)
    (bos,) = renderer.encode(family.bos)
    loop = Loop(renderer, (), data.format(bos=family.bos))
    for _ in range(3):
        ids = loop.prompt().ids
        assert ids.count(bos) == 1 and ids[0] == bos
        loop.answer(renderer.encode("Yes."), family)
        loop.ask(data.format(bos=family.bos))
    answer = Message(role=R.ASSISTANT, parts=(Text(f"No. {family.bos}"),))
    assert bos not in renderer.encode_answer(answer, loop.conversation())


# -- verl#3960: calls of a history are never cleared before it is written


@pytest.mark.parametrize("name", SOME)
def test_every_call_of_a_history_is_in_the_prompt(name: str, family_of: FamilyOf) -> None:
    family, renderer = family_of(name)
    tools = (ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
    loop = Loop(renderer, tools, "Go.")
    for turn in range(min(3, family.turns_of_a_loop)):
        command = [("bash", {"command": f"ls {turn}{turn}{turn}"})]
        loop.answer(renderer.encode(said_by(family, loop, calls=command)), family)
        loop.results(f"seen {turn}")
    text = renderer.decode(loop.prompt().ids)
    plain = renderer.decode(loop.prompt(restored={}).ids)
    for turn in range(len(loop.calls)):
        assert f"ls {turn}{turn}{turn}" in text and f"seen {turn}" in text and f"ls {turn}{turn}{turn}" in plain
