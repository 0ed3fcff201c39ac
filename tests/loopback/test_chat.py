"""One session talks: what the client sees, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from openforgerl.proxy.samples import session_samples
from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus, Chunk, FinishReason, Prompt, Sampling, Source, ThreadRole

from .house import TOOLS, GatedEngine, ask, eventually, house, scripted


async def test_a_whole_answer_and_its_record(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "Hello  there.\n"})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(sampling=Sampling(temperature=0.7, max_tokens=50))
        reply = await client.post(ask(temperature=0.1, max_tokens=60, seed=4), **{"Api-Key": "sk-secret"})
        (call,) = await home.calls()
    assert reply.status == 200
    (choice,) = reply.body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello  there.\n", "stop")
    assert reply.body["usage"] == {
        "prompt_tokens": len(call.prompt.ids),
        "completion_tokens": len(call.sampled_ids),
        "total_tokens": len(call.prompt.ids) + len(call.sampled_ids),
    }
    assert (call.status, call.index, call.dialect, call.role) == (CallStatus.COMPLETE, 0, "chat", ThreadRole.MAIN)
    assert call.finish_reason is FinishReason.STOP
    assert call.sampled_ids[-1] in renderer.stop_ids
    assert "Hello  there.\n" in renderer.decode(call.sampled_ids)
    assert renderer.decode(call.prompt.ids).count("Hi.") == 1
    # The session's temperature wins; the smallest bound on tokens wins; what was asked is kept.
    assert call.sampling_applied == Sampling(temperature=0.7, max_tokens=50)
    assert call.sampling_asked == {"temperature": 0.1, "max_tokens": 60, "seed": 4}
    assert call.response == reply.body
    assert call.request == ask(temperature=0.1, max_tokens=60, seed=4)
    assert call.request_headers["user-agent"] == "test/1"
    recorded = repr(call)
    assert client.session.key not in recorded
    assert "sk-secret" not in recorded
    assert call.timing.received <= (call.timing.first_token or 0) <= (call.timing.finished or 0)


async def test_a_stream_is_the_same_answer_in_pieces(tmp_path: Path, renderer: ChatRenderer) -> None:
    said = {"reasoning": "Let me think.", "text": "안녕 😀 naïve"}
    async with house(tmp_path, renderer, scripted(renderer, {**said, "times": 2})) as home:
        client = await home.client()
        got = await client.stream(ask(stream_options={"include_usage": True}))
        whole = await client.message(ask())
        first, second = await home.calls()
    assert got.done and got.error is None and not got.cut
    assert got.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert got.text == whole["content"] == "안녕 😀 naïve"
    assert "".join(delta.get("reasoning_content", "") for delta in got.deltas) == "Let me think."
    assert whole["reasoning_content"] == "Let me think."
    assert got.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert got.chunks[-1]["choices"] == []
    assert got.chunks[-1]["usage"]["completion_tokens"] == len(first.sampled_ids)
    assert len(got.chunks) > 6  # in pieces, not at once
    assert first.sampled_ids == second.sampled_ids
    # Recorded as the equivalent whole body.
    assert first.response["choices"][0]["message"] == whole


async def test_history_is_restored_to_what_was_sampled(tmp_path: Path, renderer: ChatRenderer) -> None:
    """The odd spacing of the sampled arguments is not what the template writes, and the harness re-serialises it."""
    raw = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command":   "ls -la"}}\n</tool_call><|im_end|>'
    ids = renderer.encode(raw)
    engine = scripted(renderer, {"token_ids": list(ids)}, {"text": "Done."})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        first = await client.message(ask("List.", tools=TOOLS))
        (sent,) = first["tool_calls"]
        assert sent["function"]["arguments"] == '{"command":   "ls -la"}'
        echoed = {**sent, "function": {"name": "bash", "arguments": '{"command":"ls -la"}'}}
        history = [
            {"role": "user", "content": [{"type": "text", "text": "List."}]},
            {"role": "assistant", "content": first["content"], "tool_calls": [echoed]},
            {"role": "tool", "tool_call_id": sent["id"], "content": "a.txt\n"},
        ]
        final = await client.message({"messages": history, "tools": TOOLS})
        one, two = await home.calls()
        samples = await home.control("GET", "/v1/sessions/s1/samples")
        known = home.proxy.sessions.get("s1").known
    assert final["content"] == "Done."
    # What every request repeats is kept once.
    assert known[1].conversation.messages[0] is known[0].conversation.messages[0]
    assert known[1].conversation.tools is known[0].conversation.tools
    assert one.sampled_ids == ids
    assert two.parent_call_id == one.call_id
    assert (two.thread, two.role) == (one.thread, ThreadRole.MAIN)
    start = len(one.prompt.ids)
    assert two.prompt.ids[: start + len(ids)] == one.prompt.ids + ids
    # Both turns train in one row, each exactly where it was sampled.
    (row,) = samples.body["samples"]
    assert row["source"] == "teacher"
    spans = [(span["call_id"], span["state"]) for span in row["spans"]]
    assert spans == [(one.call_id, "trained"), (two.call_id, "trained")]
    for span, call in zip(row["spans"], (one, two), strict=True):
        assert tuple(row["ids"][span["start"] : span["stop"]]) == call.sampled_ids
    assert samples.body["totals"] == {
        "sampled": len(ids) + len(two.sampled_ids),
        "trained": len(ids) + len(two.sampled_ids),
        "masked": {},
        "dropped": {},
    }


async def test_the_client_sees_a_piece_before_the_next_but_one_is_sampled(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    ids = renderer.encode("one two three four five six seven<|im_end|>")
    engine = GatedEngine(ids)
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        seen, stream = "", client.events(ask())
        for count in range(1, len(ids)):
            engine.allow()
            text = renderer.decode(ids[:count])
            async with asyncio.timeout(5):
                while seen != text:
                    seen += json.loads(await anext(stream))["choices"][0]["delta"].get("content") or ""
            # Everything sampled so far is in the client's hands, and nothing more was sampled.
            assert engine.sampled == count
        engine.allow()
        rest = [data async for data in stream]
        (call,) = await home.calls()
    assert rest[-1] == "[DONE]"
    assert call.logprobs == (-0.5,) * len(ids)
    assert call.weights_version == 3
    assert call.weights_spans == ()


async def test_nothing_is_final_before_it_is_committed(tmp_path: Path, renderer: ChatRenderer) -> None:
    """When the client has the end mark, a second reader of the database already sees the whole call."""
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a b c", "times": 0})) as home:
        client = await home.client()
        for number in range(5):
            async for data in client.events(ask()):
                (*_, call) = await home.store.calls("s1")
                assert call.index == number
                if data == "[DONE]" or json.loads(data)["choices"][0]["finish_reason"]:
                    assert call.status is CallStatus.COMPLETE
                else:
                    assert call.status in (CallStatus.INTENT, CallStatus.COMPLETE)


async def test_a_stop_string_ends_the_clients_text_but_not_the_record(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "x = 1</code> and then more text that is never wanted", "times": 0})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        whole = await client.post(ask(stop=["Observation:", "</code>"]))
        got = await client.stream(ask(stop="</code>"))
        history = [*ask()["messages"], {"role": "assistant", "content": "x = 1"}, {"role": "user", "content": "go on"}]
        await client.post({"messages": history})
        first, second, third = await home.calls()
    assert whole.body["choices"][0]["message"]["content"] == got.text == "x = 1"
    assert (whole.body["choices"][0]["finish_reason"], got.finish, got.done) == ("stop", "stop", True)
    for call in (first, second):
        assert (call.status, call.finish_reason) == (CallStatus.COMPLETE, FinishReason.STOP_STRING)
        assert "</code>" in renderer.decode(call.sampled_ids)
        assert call.sampled_ids[-1] not in renderer.stop_ids
        assert call.off_policy is None
    # Such a turn is never restored: the third prompt holds the template's own rendering of the cut text.
    assert all(span.kind != "call" for span in third.prompt.origins)


async def test_length(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "one two three four five", "times": 0})) as home:
        client = await home.client()
        got = await client.stream(ask(max_completion_tokens=4))
        (call,) = await home.calls()
    assert (got.finish, got.done) == ("length", True)
    assert len(call.sampled_ids) == 4 == call.sampling_applied.max_tokens
    assert call.finish_reason is FinishReason.LENGTH


async def test_a_session_that_samples_greedily_is_off_policy(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a"})) as home:
        client = await home.client(sampling=Sampling(temperature=0))
        await client.message(ask(temperature=1))
        (call,) = await home.calls()
    assert call.off_policy == "greedy"


async def test_every_call_of_a_seeded_session_draws_its_own_numbers(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        seeds: list[list[int | None]] = []
        for name in ("s1", "s2"):
            client = await home.client(name, sampling=Sampling(seed=7))
            for _ in range(3):
                await client.message(ask(seed=1))
            seeds.append([call.sampling_applied.seed for call in await home.calls(name)])
    assert seeds[0] == seeds[1]  # reproducible
    assert seeds[0][0] == 7
    assert len(set(seeds[0])) == 3


async def test_an_empty_answer_is_an_answer(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "", "times": 0})) as home:
        client = await home.client()
        message = await client.message(ask())
        got = await client.stream(ask())
        first, _ = await home.calls()
    assert message == {"role": "assistant", "content": ""}
    assert (got.text, got.finish, got.done) == ("", "stop", True)
    assert first.status is CallStatus.COMPLETE
    assert first.sampled_ids


async def test_parallel_tool_calls_and_arguments_that_are_no_json(tmp_path: Path, renderer: ChatRenderer) -> None:
    calls = [{"name": "bash", "arguments": {"command": "ls"}}, {"name": "bash", "arguments": '{"command": "l'}]
    async with house(tmp_path, renderer, scripted(renderer, {"tool_calls": calls, "times": 0})) as home:
        client = await home.client()
        message = await client.message(ask(tools=TOOLS))
        got = await client.stream(ask(tools=TOOLS))
    assert message["content"] is None
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"command": "ls"}
    assert second["function"]["arguments"] == '{"command": "l'
    assert first["id"] != second["id"]
    assert first["id"].isalnum()
    pieces: dict[int, str] = {0: "", 1: ""}
    for delta in got.deltas:
        for call in delta.get("tool_calls", ()):
            pieces[call["index"]] += call["function"]["arguments"]
    assert pieces == {0: first["function"]["arguments"], 1: '{"command": "l'}
    assert got.finish == "tool_calls"


async def test_keep_alive_comments_while_the_model_is_silent(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("a b<|im_end|>"))
    async with house(tmp_path, renderer, engine, keep_alive_s=0.02) as home:
        client = await home.client()
        url, headers = client.url, client.headers
        async with home.http.post(url, json=ask(stream=True), headers=headers) as response:
            seen = b""
            while seen.count(b": keep-alive\n\n") < 3:
                seen += await response.content.readany()
            assert engine.sampled == 0
            assert b"data: " not in seen  # an answer that has not begun is not opened
            engine.allow(10)
            seen += await response.content.read()
    assert seen.endswith(b"data: [DONE]\n\n")


async def test_models(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, model_name="tiny")) as home:
        client = await home.client()
        base = client.session.base_urls["chat"]
        async with home.http.get(f"{base}/models", headers=client.headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        async with home.http.get(f"{base}/models/any", headers=client.headers) as response:
            assert (await response.json())["id"] == "any"


async def test_unlisted_fields_are_answered_recorded_and_counted(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        client = await home.client()
        for _ in range(2):
            await client.message(ask(shiny=1))
        first, _ = await home.calls()
        async with home.http.get(f"{home.control_url}/healthz") as response:
            health = await response.json()
    assert first.warnings == ("unlisted field shiny",)
    assert health["unlisted_fields"] == {"chat:shiny": 2}
    async with house(tmp_path / "strict", renderer, scripted(renderer), strict_fields=True) as home:
        reply = await (await home.client()).post(ask(shiny=1))
        assert (reply.status, reply.body["error"]["param"]) == (400, "shiny")


async def test_one_session_may_carry_several_conversations_at_once(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("x<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        main = asyncio.create_task(client.message(ask("Main.")))
        await eventually(lambda: engine.running == 1)
        other = asyncio.create_task(client.message(ask("Something else.")))
        await eventually(lambda: engine.running == 2)
        engine.allow(100)
        await asyncio.gather(main, other)
        first, second = await home.calls()
    assert first.role is ThreadRole.MAIN
    assert first.thread != second.thread


@pytest.mark.parametrize(("metadata", "source"), [({}, Source.POLICY), ({"source": "teacher"}, Source.TEACHER)])
async def test_the_source_of_samples(
    tmp_path: Path, renderer: ChatRenderer, metadata: dict[str, str], source: Source
) -> None:
    engine = GatedEngine(renderer.encode("x<|im_end|>"), free=True)
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(metadata=metadata)
        await client.message(ask())
        samples = session_samples(home.proxy.sessions.get("s1").record, await home.calls())
    assert [sample.source for sample in samples.samples] == [source]


class Reloading(GatedEngine):
    """Its weights change from 3 to 4 after the second id."""

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        affinity: str,
        priority: int = 0,
        deadline: float | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(prompt, sampling, affinity=affinity):
            yield msgspec.structs.replace(chunk, weights_version=3 if self.sampled <= 2 else 4)


async def test_weights_that_change_mid_answer_are_recorded_per_token(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = Reloading(renderer.encode("abcd<|im_end|>"), free=True)
    count = len(engine.ids)
    async with house(tmp_path, renderer, engine) as home:
        await (await home.client()).message(ask())
        (call,) = await home.calls()
    assert call.weights_version == 3
    assert [(span.start, span.stop, span.version) for span in call.weights_spans] == [(0, 2, 3), (2, count, 4)]
