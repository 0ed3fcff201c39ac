"""The second renderer: against ours, against transformers, and by the same laws."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from openforgerl.errors import ConfigError, TemplateError
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.types import Conversation, Message, Role, Text, ToolCall

from .conftest import byte_level
from .families import BY_NAME, Family
from .family_table import Loop, said_by
from .test_families import ARGUMENTS, SOLID, TOOLS, WORDS, loops

pytest.importorskip("renderers", reason="the extra `renderers` is not installed")

SETTINGS = settings(
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PACKAGES = {
    "Qwen 3": "qwen3",
    "Qwen3-VL": "qwen3-vl",
    "Qwen 3.5": "qwen3.5",
    "Qwen 3.6": "qwen3.6",
    "GLM 4.5": "glm-4.5",
    "Kimi K2": "kimi-k2",
    "DeepSeek V3": "deepseek-v3",
}
SAME_IDS = ["Qwen 3", "Qwen3-VL", "Qwen 3.5", "Qwen 3.6", "GLM 4.5"]
ALL = pytest.mark.parametrize("name", list(PACKAGES))
Both = tuple[Family, ChatRenderer, ChatRenderer]


@pytest.fixture(scope="session")
def both_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    """A family with our renderer of it and the package's."""

    @cache
    def get(name: str) -> Both:
        directory = tmp_path_factory.mktemp("packaged") / "model"
        BY_NAME[name].write(directory, byte_level([]))
        return BY_NAME[name], load_renderer(directory), load_renderer(directory, package=PACKAGES[name])

    return get


@pytest.mark.parametrize("name", SAME_IDS)
@SETTINGS
@given(data=st.data())
def test_both_write_the_same_prompt(name: str, data: st.DataObject, both_of: Callable[[str], Both]) -> None:
    _, ours, theirs = both_of(name)
    conversation = data.draw(loops(SOLID))
    first = ours.render(conversation, restored={}, clock=0.0, kwargs={})
    second = theirs.render(conversation, restored={}, clock=0.0, kwargs={})
    assert theirs.decode(second.ids) == ours.decode(first.ids)
    assert second.ids == first.ids


@ALL
@SETTINGS
@given(data=st.data())
def test_data_is_never_structure(name: str, data: st.DataObject, both_of: Callable[[str], Both]) -> None:
    family, ours, theirs = both_of(name)
    added = [*family.special.split(), *family.plain.split()]
    halves = [token[:3] for token in added] + [token[-3:] for token in added]
    hostile = st.lists(st.sampled_from([*added, *halves, *WORDS]), min_size=1, max_size=4).map("".join)
    conversation = data.draw(loops(hostile, beside=False))
    prompt = theirs.render(conversation, restored={}, clock=0.0, kwargs={})
    shown = theirs.decode(prompt.ids)
    for message in conversation.messages:
        if message.role is Role.TOOL and name not in ("Kimi K2", "DeepSeek V3"):
            assert message.text.strip() in shown
    ids = {ours.encode(text)[0]: text for text in added}
    plain = (Text("aaa"),)
    harmless = Conversation(
        messages=tuple(
            msgspec.structs.replace(message, parts=plain if message.text else ()) for message in conversation.messages
        ),
        tools=TOOLS,
    )
    expected = theirs.render(harmless, restored={}, clock=0.0, kwargs={})
    allowed = {"<think>", "</think>"}  # whether a thought is written depends on whether there is one
    count = sorted(ids[i] for i in prompt.ids if i in ids and ids[i] not in allowed)
    assert count == sorted(ids[i] for i in expected.ids if i in ids and ids[i] not in allowed)


@ALL
@SETTINGS
@given(data=st.data())
def test_a_tool_loop_comes_back_id_by_id(name: str, data: st.DataObject, both_of: Callable[[str], Both]) -> None:
    """DeepSeek V3 for more than one turn too: there its template loses the second call."""
    family, _, renderer = both_of(name)
    loop = Loop(renderer, TOOLS, data.draw(SOLID))
    for _ in range(3):
        text = said_by(family, loop, calls=[("bash", data.draw(ARGUMENTS))], odd=data.draw(st.integers(0, 5)))
        call = loop.answer(renderer.encode(text), family)
        assert call.answer is not None
        assert [made.name for made in call.answer.tool_calls] == ["bash"]
        loop.results(data.draw(SOLID))
        prompt = loop.prompt()
        assert prompt.ids[: len(call.prompt.ids) + len(call.sampled_ids) - 1] == call.prompt.ids + call.sampled_ids[:-1]
        spans = [span for span in prompt.origins if span.kind == "call"]
        assert [span.call_id for span in spans] == [made.call_id for made in loop.calls]


@pytest.mark.parametrize("name", ["Qwen 3", "Qwen 3.5", "GLM 4.5"])
def test_a_dropped_thought_starts_a_branch(name: str, both_of: Callable[[str], Both]) -> None:
    family, _, renderer = both_of(name)
    loop = Loop(renderer, TOOLS, "go")
    loop.answer(renderer.encode(said_by(family, loop, thought="Hm.", text="Done.")), family)
    loop.ask("And now?")
    assert loop.prompt() == loop.prompt(restored={})


@ALL
def test_what_an_answer_is_encoded_to_parses_to_it(name: str, both_of: Callable[[str], Both]) -> None:
    _, _, renderer = both_of(name)
    arguments = {"command": "ls", "n": 3}
    conversation = Conversation(messages=(Message(role=Role.USER, parts=(Text("go"),)),), tools=TOOLS)
    call = ToolCall(id="functions.bash:0", name="bash", arguments=json.dumps(arguments))
    ids = renderer.encode_answer(Message(role=Role.ASSISTANT, tool_calls=(call,)), conversation)
    assert ids[-1] in renderer.stop_ids
    prompt = renderer.render(conversation, restored={}, clock=0.0, kwargs={})
    parser = renderer.parser(conversation, prompt, seed="s")
    parser.feed(ids)
    (made,) = parser.finish()[1].tool_calls
    assert (made.name, json.loads(made.arguments)) == ("bash", arguments)


def test_what_it_refuses(both_of: Callable[[str], Both], tmp_path: Any) -> None:
    family, _, renderer = both_of("Qwen 3")
    held = Conversation(messages=(Message(role=Role.USER, parts=(Text("\U0010fffd"),)),))
    with pytest.raises(TemplateError, match=r"U\+10FFFD"):
        renderer.render(held, restored={}, clock=0.0, kwargs={})
    family.write(tmp_path / "model", byte_level([]))
    with pytest.raises(ConfigError, match=r"has no format 'nope'; it has .*kimi-k2"):
        load_renderer(tmp_path / "model", package="nope")
    assert renderer.answer_form.endswith("prompts by renderers 0.1.12, qwen3")
