"""Every dialect over real HTTP: the same conversation, the same record, each in its own words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus, FinishReason, Limits, Sampling, ThreadRole

from .house import GatedEngine, eventually, house, scripted
from .speakers import SPEAKERS, Speaker, Talker

EVERY = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda speaker: speaker.name)
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

LOOK = '<tool_call>\n{"name": "bash", "arguments": {"command":   "ls -la",  "n": 1.0}}\n</tool_call>'
"""A call in the policy's own spacing: neither the template nor any client writes it so."""


@EVERY
async def test_an_answer_and_its_record(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    said = {"text": "안녕 😀 naïve\n", "times": 0}
    async with house(tmp_path, renderer, scripted(renderer, said)) as home:
        talker = await Talker.open(home, speaker)
        reply = await talker.ask(speaker.user("Hi."))
        whole = speaker.whole(reply.body)
        streamed = await talker.say(speaker.user("Hi."), stream=True)
        first, second = await home.calls()
    for got in (whole, streamed):
        assert (got.text, got.reasoning, got.calls, got.done) == ("안녕 😀 naïve\n", "", [], True)
        assert got.finish == speaker.finishes[0]
        assert got.prompt_tokens == len(first.prompt.ids)
        assert got.completion_tokens == len(first.sampled_ids)
    for call in (first, second):
        assert (call.dialect, call.status, call.role) == (speaker.name, CallStatus.COMPLETE, ThreadRole.MAIN)
        assert call.finish_reason is FinishReason.STOP
        assert call.sampled_ids == renderer.encode("안녕 😀 naïve\n<|im_end|>")
        assert talker.headers[speaker.key_header].removeprefix("Bearer ") not in repr(call)
    assert first.response == reply.body
    assert speaker.whole(second.response).text == "안녕 😀 naïve\n"  # a stream is recorded as the whole it equals
    assert first.request == speaker.body(speaker.user("Hi."), stream=False, tools=False)
    assert first.request_headers[":path"].endswith(speaker.path(stream=False))
    assert reply.headers["x-request-id"] == first.call_id
    assert reply.headers.get("request-id") == (first.call_id if speaker.name == "messages" else None)


@EVERY
async def test_the_first_piece_comes_when_one_token_is_sampled(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker
) -> None:
    ids = renderer.encode("QXZJ and so on<|im_end|>")
    assert renderer.decode(ids[:1]) == "Q"
    engine = GatedEngine(ids)
    engine.allow(1)
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        pieces = talker.pieces(speaker.user("Hi."))
        raw = b""
        async with asyncio.timeout(10):
            while b'"Q"' not in raw:
                raw += await anext(pieces)
            assert engine.sampled == 1
            engine.allow(100)
            async for piece in pieces:
                raw += piece
    said = speaker.streamed(raw)
    assert (said.text, said.done) == ("QXZJ and so on", True)


@EVERY
@BOTH
async def test_an_echoed_turn_becomes_what_was_sampled(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker, stream: bool
) -> None:
    sampled = renderer.encode(f"<think>\nFirst look.\n</think>\n\nI look.\n{LOOK}<|im_end|>")
    engine = scripted(renderer, {"token_ids": list(sampled)}, {"text": "Done."}, {"text": "Bye."})
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        history = speaker.user("List.")
        first = await talker.say(history, tools=True, stream=stream)
        assert (first.text, first.finish) == ("I look.", speaker.finishes[1])
        ((call_id, name, arguments),) = first.calls
        assert name == "bash"
        assert json.loads(arguments) == {"command": "ls -la", "n": 1.0}
        assert call_id.replace("_", "").isalnum()
        history += first.turn + speaker.result(first.calls[0], "a.txt\n")
        second = await talker.say(history, tools=True, stream=stream)
        assert second.text == "Done."
        history += second.turn + speaker.user("Thanks.")
        assert (await talker.say(history, tools=True, stream=stream)).text == "Bye."
        one, two, three = await home.calls()
        samples = await home.control("GET", "/v1/sessions/s1/samples")
    assert one.sampled_ids == sampled
    assert (two.parent_call_id, three.parent_call_id) == (one.call_id, two.call_id)
    assert two.prompt.ids[: len(one.prompt.ids) + len(sampled)] == one.prompt.ids + sampled
    # What follows is the template's own closing and the tool's result, neither sampled.
    rest = renderer.decode(two.prompt.ids[len(one.prompt.ids) + len(sampled) :])
    assert rest == "\n<|im_start|>user\n<tool_response>\na.txt\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert samples.body["totals"]["dropped"] == {}
    assert samples.body["totals"]["trained"] == sum(len(call.sampled_ids) for call in (one, two, three))
    # The template drops the thought once another question is asked: a branch, and the first two calls share one row.
    rows = [[span["call_id"] for span in row["spans"]] for row in samples.body["samples"]]
    assert [one.call_id, two.call_id] in rows


@EVERY
@BOTH
async def test_parallel_calls(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker, stream: bool) -> None:
    calls = [{"name": "bash", "arguments": {"command": command}} for command in ("ls", "pwd")]
    engine = scripted(renderer, {"tool_calls": calls}, {"text": "Done."})
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        history = speaker.user("Two.")
        said = await talker.say(history, tools=True, stream=stream)
        assert [json.loads(arguments)["command"] for _, _, arguments in said.calls] == ["ls", "pwd"]
        assert len({call_id for call_id, _, _ in said.calls}) == 2
        history += said.turn
        for call in reversed(said.calls):  # in order of completion, not of the calls
            history += speaker.result(call, f"of {call[2]}")
        assert (await talker.say(history, tools=True)).text == "Done."
        one, two = await home.calls()
    assert two.parent_call_id == one.call_id
    assert two.prompt.ids[: len(one.prompt.ids) + len(one.sampled_ids)] == one.prompt.ids + one.sampled_ids
    answered = [message.tool_call_id for message in two.conversation.messages[2:]]
    assert answered == [call_id for call_id, _, _ in reversed(said.calls)]


HIDING: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ("gemini", {}),
]


@pytest.mark.parametrize(("name", "fields"), HIDING, ids=[name for name, _ in HIDING])
@BOTH
async def test_a_thought_that_was_not_shown_comes_back(
    tmp_path: Path, renderer: ChatRenderer, name: str, fields: dict[str, Any], stream: bool
) -> None:
    speaker = next(speaker for speaker in SPEAKERS if speaker.name == name)
    sampled = renderer.encode(f"<think>\nSecret plan.\n</think>\n\n{LOOK}<|im_end|>")
    engine = scripted(renderer, {"token_ids": list(sampled)}, {"text": "Done."}, {"text": "Done."})
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        history = speaker.user("List.")
        first = await talker.say(history, tools=True, stream=stream, **fields)
        assert first.reasoning == ""
        assert "Secret" not in json.dumps(first.turn)
        history += first.turn + speaker.result(first.calls[0], "a.txt")
        await talker.say(history, tools=True, **fields)
        # Another session knows nothing of the handle.
        other = await Talker.open(home, speaker, "s2")
        await other.say(history, tools=True, **fields)
        one, two = await home.calls()
        (foreign,) = await home.calls("s2")
    assert two.prompt.ids[: len(one.prompt.ids) + len(sampled)] == one.prompt.ids + sampled
    assert "Secret plan." not in renderer.decode(foreign.prompt.ids)
    assert any("thought" in warning or "reasoning" in warning for warning in foreign.warnings)


@EVERY
@pytest.mark.parametrize("name", ["bash", None])
@BOTH
async def test_a_forced_call(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker, name: str | None, stream: bool
) -> None:
    begun = "" if name else 'bash", "arguments":'
    engine = GatedEngine(renderer.encode(begun + ' {"command": "ls"}}\n</tool_call><|im_end|>'), free=True)
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        history = speaker.user("List.")
        said = await talker.say(history, tools=True, stream=stream, **speaker.forced(name))
        history += said.turn + speaker.result(said.calls[0], "a.txt")
        await talker.say(history, tools=True)
        call, following = await home.calls()
        samples = await home.control("GET", "/v1/sessions/s1/samples")
    ((_, called, arguments),) = said.calls
    assert (called, json.loads(arguments), said.text, said.reasoning) == ("bash", {"command": "ls"}, "", "")
    opening = '<tool_call>\n{"name": "bash", "arguments":' if name else '<tool_call>\n{"name": "'
    assert renderer.decode(call.prompt.ids).endswith("assistant\n<think>\n\n</think>\n\n" + opening)
    assert call.off_policy == "forced"
    assert call.sampled_ids == engine.ids
    assert following.prompt.ids[: len(call.prompt.ids) + len(engine.ids)] == call.prompt.ids + engine.ids
    assert samples.body["totals"]["masked"] == {"off_policy:forced": len(engine.ids)}


@EVERY
async def test_an_answer_that_is_cut_by_length(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "one two three four", "times": 0})) as home:
        talker = await Talker.open(home, speaker)
        for stream in (False, True):
            said = await talker.say(speaker.user("Hi."), stream=stream, **speaker.most(3))
            assert (said.finish, said.completion_tokens) == (speaker.finishes[2], 3)
        calls = await home.calls()
    assert [call.finish_reason for call in calls] == [FinishReason.LENGTH] * 2
    assert {call.sampling_applied.max_tokens for call in calls} == {3}


@pytest.mark.parametrize("speaker", [speaker for speaker in SPEAKERS if speaker.count_path], ids=lambda one: one.name)
async def test_the_size_of_a_prompt(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        talker = await Talker.open(home, speaker, limits=Limits(calls=1))
        body = speaker.body(speaker.user("How long is this?"), stream=False, tools=True)
        for _ in range(3):
            counted = await talker.post(speaker.count_path, body)
            assert counted.status == 200, counted.body
        assert await home.calls() == []
        said = await talker.say(speaker.user("How long is this?"), tools=True)
        assert speaker.counted(counted.body) == said.prompt_tokens
        again = await talker.post(speaker.count_path, body)  # the only call is used up, but this is none
        assert again.body == counted.body
        huge = await talker.post(
            speaker.count_path, speaker.body(speaker.user("x" * 700_000), stream=False, tools=False)
        )
        assert (huge.status, speaker.code(huge.body)) == (400, "context_length_exceeded")
        assert (await talker.post(speaker.count_path, {})).status == 400
        await home.sessions.seal("s1")
        closed = await talker.post(speaker.count_path, body)
        assert (closed.status, speaker.code(closed.body)) == (403, "session_closed")
        assert len(await home.calls()) == 1


@pytest.mark.parametrize("speaker", [speaker for speaker in SPEAKERS if speaker.count_path], ids=lambda one: one.name)
@pytest.mark.parametrize("force", [False, True], ids=["free", "forced"])
async def test_the_size_of_a_prompt_is_that_of_the_call(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker, force: bool
) -> None:
    """The sampled spacing is not the template's: with the turn rendered anew, the prompt has another length."""
    sampled = renderer.encode(f"I look.\n{LOOK}<|im_end|>")
    next_ids = renderer.encode(' {"command": "ls"}}\n</tool_call><|im_end|>' if force else "Done.<|im_end|>")
    engine = scripted(renderer, {"token_ids": list(sampled)}, {"token_ids": list(next_ids)})
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        history = speaker.user("List.")
        first = await talker.say(history, tools=True)
        history += first.turn + speaker.result(first.calls[0], "a.txt\n")
        fields = speaker.forced("bash") if force else {}
        body = speaker.body(history, stream=False, tools=True, **fields)
        for _ in range(2):
            counted = await talker.post(speaker.count_path, body)
            assert counted.status == 200, counted.body
        said = await talker.say(history, tools=True, **fields)
        one, two = await home.calls()
    assert speaker.counted(counted.body) == said.prompt_tokens == len(two.prompt.ids)
    assert two.parent_call_id == one.call_id
    assert two.prompt.ids[len(one.prompt.ids) :][: len(sampled)] == sampled


@EVERY
async def test_long_prompts_are_rendered_in_order(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    """They are rendered in threads; still the first request opens the session, whichever is ready first."""
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        talker = await Talker.open(home, speaker, sampling=Sampling(max_tokens=5))
        slow = asyncio.create_task(talker.say(speaker.user("word " * 9000), tools=True))
        await eventually(lambda: home.proxy.sessions.get("s1").prompting.locked())
        quick = asyncio.create_task(talker.say(speaker.user("quick"), tools=True))
        await asyncio.gather(slow, quick)
        first, second = await home.calls()
    assert (first.index, first.role) == (0, ThreadRole.MAIN)
    assert len(first.prompt.ids) > 9000 > len(second.prompt.ids)
    assert second.thread != first.thread
