"""The scripted engine: which entry answers, what it emits, how it fails, and what the file reader refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.errors import EngineError, EngineOverloaded, InputError
from openforgerl.protocols import InferenceEngine
from openforgerl.types import Chunk, Conversation, FinishReason, Message, Prompt, Role, Sampling, Text

from .byte_renderer import END, ByteRenderer

RENDERER = ByteRenderer()


def script(*answers: dict[str, Any]) -> Script:
    return Script.decode(json.dumps({"answers": answers}))


def prompt(*texts: str) -> Prompt:
    messages = tuple(Message(role=Role.USER, parts=(Text(text),)) for text in texts)
    return RENDERER.render(Conversation(messages=messages), restored={}, clock=0, kwargs={})


async def ask(engine: ScriptedEngine, *texts: str, session: str = "s", **sampling: Any) -> list[Chunk]:
    stream = engine.generate(prompt(*texts), Sampling(**sampling), affinity=session)
    return [chunk async for chunk in stream]


def said(chunks: list[Chunk]) -> str:
    return RENDERER.decode([id for chunk in chunks for id in chunk.ids])


def test_is_an_engine() -> None:
    engine = ScriptedEngine(script({"text": "x"}), RENDERER, model_name="m", context_length=9)
    assert isinstance(engine, InferenceEngine)
    assert (engine.model_name, engine.context_length, engine.weights_version) == ("m", 9, 0)


async def test_first_unused_fitting_entry_answers_for_each_session_alone() -> None:
    engine = ScriptedEngine(
        script({"match": "^red$", "text": "r"}, {"match": "e", "times": 2, "text": "e"}, {"text": "z", "times": 0}),
        RENDERER,
    )
    for session in ("one", "two"):
        answers = [said(await ask(engine, "grey", "red", session=session)) for _ in range(5)]
        assert answers == ["r>", "e>", "e>", "z>", "z>"]


async def test_only_the_last_message_is_matched() -> None:
    engine = ScriptedEngine(script({"match": "old", "text": "wrong"}, {"text": "right"}), RENDERER)
    assert said(await ask(engine, "old", "new")) == "right>"


async def test_unknown_origins_match_the_whole_prompt() -> None:
    engine = ScriptedEngine(script({"match": "^<old><new>", "text": "yes"}), RENDERER)
    stream = engine.generate(Prompt(ids=RENDERER.encode("<old><new><")), Sampling(), affinity="s")
    assert said([chunk async for chunk in stream]) == "yes>"


async def test_none_left_names_the_request() -> None:
    engine = ScriptedEngine(script({"text": "once"}), RENDERER)
    await ask(engine, "a")
    with pytest.raises(EngineError, match=r"session 's', whose last message is 'count the sheep'") as caught:
        await ask(engine, "count the sheep")
    assert caught.value.status == 500


async def test_a_function_picks_the_script_by_session() -> None:
    asked: list[str] = []

    def pick(session: str) -> Script:
        asked.append(session)
        return script({"text": f"for {session}", "times": None})

    engine = ScriptedEngine(pick, RENDERER)
    assert said(await ask(engine, "q", session="a")) == "for a>"
    assert said(await ask(engine, "q", session="b")) == "for b>"
    assert said(await ask(engine, "q", session="a")) == "for a>"
    assert asked == ["a", "b"]


@pytest.mark.parametrize(
    ("answer", "ids", "finish"),
    [
        ({"text": "hi"}, (*b"hi", END), FinishReason.STOP),
        ({"text": ""}, (END,), FinishReason.STOP),
        ({"text": "hi", "finish_reason": "length"}, tuple(b"hi"), FinishReason.LENGTH),
        (
            {"reasoning": "a", "text": "b", "tool_calls": [{"name": "c", "arguments": {"d": "é"}}]},
            (*'abc{"d": "é"}'.encode(), END),
            FinishReason.STOP,
        ),
        (
            {"tool_calls": [{"type": "function", "function": {"name": "c", "arguments": "{broken"}}]},
            (*b"c{broken", END),
            FinishReason.STOP,
        ),
        ({"raw": "a<b>c"}, (97, 256, 98, 257, 99, END), FinishReason.STOP),
        ({"raw": "a>"}, (97, END), FinishReason.STOP),
        ({"raw": "a>", "finish_reason": "length"}, (97,), FinishReason.LENGTH),
        ({"token_ids": [1, 2, END]}, (1, 2, END), FinishReason.STOP),
        ({"token_ids": [1, 2]}, (1, 2), FinishReason.LENGTH),
        ({"token_ids": [1, 2], "finish_reason": "tool_calls"}, (1, 2), FinishReason.STOP),
    ],
)
async def test_what_each_form_emits(answer: dict[str, Any], ids: tuple[int, ...], finish: FinishReason) -> None:
    chunks = await ask(ScriptedEngine(script(answer), RENDERER), "q")
    assert tuple(id for chunk in chunks for id in chunk.ids) == ids
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]
    assert all(chunk.logprobs is None for chunk in chunks)


async def test_chunks_and_delay() -> None:
    engine = ScriptedEngine(script({"raw": "abcde", "chunk_tokens": 2, "delay_s": 0.02}), RENDERER)
    begun = time.monotonic()
    assert [chunk.ids for chunk in await ask(engine, "q")] == [(97, 98), (99, 100), (101, END)]
    assert time.monotonic() - begun >= 0.06


@pytest.mark.parametrize(("cut", "chunk", "before"), [(3, 1, "abc"), (3, 2, "abc"), (0, 1, ""), (6, 4, "abcde>")])
async def test_a_cut_stream_breaks_after_so_many_tokens(cut: int, chunk: int, before: str) -> None:
    engine = ScriptedEngine(script({"raw": "abcde", "cut_after_tokens": cut, "chunk_tokens": chunk}), RENDERER)
    got: list[Chunk] = []
    with pytest.raises(EngineError, match=f"after {cut} tokens"):
        async for piece in engine.generate(prompt("q"), Sampling(), affinity="s"):
            got.append(piece)
    assert said(got) == before
    assert all(piece.finish is None for piece in got)


async def test_a_cut_beyond_the_end_cuts_nothing() -> None:
    engine = ScriptedEngine(script({"raw": "ab", "cut_after_tokens": 9}), RENDERER)
    assert (await ask(engine, "q"))[-1].finish is FinishReason.STOP


async def test_max_tokens_and_the_context_cut_to_length() -> None:
    engine = ScriptedEngine(script({"text": "abcdef", "times": 0}), RENDERER, context_length=7)
    chunks = await ask(engine, "q", max_tokens=2)
    assert (said(chunks), chunks[-1].finish) == ("ab", FinishReason.LENGTH)
    assert said(await ask(engine, "q")) == "abc"  # the prompt "<q><" takes four of the seven
    with pytest.raises(EngineError, match="8 prompt tokens leave no room in a context of 7"):
        await ask(engine, "abcde")


async def test_errors() -> None:
    engine = ScriptedEngine(
        script({"error": {"status": 503}}, {"error": {"status": 429, "retry_after": 2.5}}, {"error": {"status": 429}}),
        RENDERER,
    )
    with pytest.raises(EngineError) as first:
        await ask(engine, "q")
    assert first.value.status == 503
    with pytest.raises(EngineOverloaded) as second:
        await ask(engine, "q")
    assert second.value.retry_after == 2.5
    with pytest.raises(EngineOverloaded) as third:
        await ask(engine, "q")
    assert third.value.retry_after == 1


async def test_deadline_ends_a_slow_answer() -> None:
    engine = ScriptedEngine(script({"text": "abc", "delay_s": 30}), RENDERER)
    begun = time.monotonic()
    stream = engine.generate(prompt("q"), Sampling(), affinity="s", deadline=time.time() + 0.05)
    chunks = [chunk async for chunk in stream]
    assert [(chunk.ids, chunk.finish) for chunk in chunks] == [((), FinishReason.ABORTED)]
    assert time.monotonic() - begun < 15


async def test_closed() -> None:
    engine = ScriptedEngine(script({"text": "abc"}), RENDERER)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await ask(engine, "q")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("{", "not JSON"),
        ("{}", "missing required field `answers`"),
        ('{"answers": [{"text": 1}]}', r"answers\[0\].text: Expected `str"),
        ('{"answers": [{"text": "a"}, {"tetx": "a"}]}', r"answers\[1\]: Object contains unknown field `tetx`"),
        ('{"answers": [{"text": "a", "match": "("}]}', r"answers\[0\].match: bad regex '\('"),
        ('{"answers": [{}]}', r"answers\[0\]: give exactly one of .* got none"),
        ('{"answers": [{"raw": "a", "token_ids": []}]}', r"answers\[0\]: give exactly one .* raw and token_ids"),
        ('{"answers": [{"text": "a", "times": -1}]}', r"answers\[0\].times: must be 0"),
        ('{"answers": [{"text": "a", "chunk_tokens": 0}]}', r"answers\[0\].chunk_tokens: must be 1 or more"),
        ('{"answers": [{"error": {"status": 200}}]}', r"answers\[0\].error.status: must be an HTTP error"),
        (
            '{"answers": [{"error": {"status": 500, "retry_after": -1}}]}',
            r"answers\[0\].error.retry_after: must be 0 or more",
        ),
        ('{"answers": [{"tool_calls": [{"id": "x"}]}]}', r"answers\[0\].tool_calls\[0\]: a tool call has"),
    ],
)
def test_the_reader_names_file_entry_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        Script.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: No such file"):
        Script.load(tmp_path / "absent.json")


async def test_any_error_can_say_when_to_come_back() -> None:
    engine = ScriptedEngine(script({"error": {"status": 503, "retry_after": 2.5}}), RENDERER)
    with pytest.raises(EngineError) as refused:
        async for _ in engine.generate(prompt("q"), Sampling(), affinity="s"):
            pass
    assert (refused.value.status, refused.value.retry_after) == (503, 2.5)


def test_ids_that_no_token_has_are_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"answers": [{"text": "a"}, {"token_ids": [1, 999999]}]}')
    with pytest.raises(InputError, match=r"answers\[1\]\.token_ids: 999999 is no token"):
        ScriptedEngine.open(path, RENDERER, EngineOptions())
