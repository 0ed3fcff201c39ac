"""A model behind somebody else's API, in every dialect: what agents get, what is recorded, what SFT can use."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions, RelayOptions
from openforgerl.engines.relay import RelayEngine
from openforgerl.proxy.samples import session_samples
from openforgerl.rendering import ChatRenderer
from openforgerl.testing.fake_upstream import (
    KEY,
    Upstream,
    anthropic,
    calls,
    chunk,
    data,
    openai,
    refuse,
    says,
    stream,
    upstream,
)
from openforgerl.trajectory.samples import SamplePolicy, build_samples
from openforgerl.trajectory.tree import build
from openforgerl.types import CallStatus, FinishReason, Limits, ModelCall, Rollout, SampleSet, Sampling, Source
from openforgerl.wire import SseReader

from .house import NO_LIMITS, TOOLS, Client, House, ask, eventually, house

LS = '{"command": "ls"}'
PNG = b"\x89PNG\r\n\x1a\n not really"


def relay(renderer: ChatRenderer, fake: Upstream, kind: str = "openai", **options: Any) -> RelayEngine:
    given = RelayOptions(**{"model": "teacher-1", "backoff_s": 0.01, "key_env": "TEACHER_KEY", **options})
    engine = open_engine(f"relay:{kind}:{fake.url}", renderer, EngineOptions(relay=given, model_name="teacher"))
    assert isinstance(engine, RelayEngine)
    return engine


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)


def samples_of(recorded: list[ModelCall], source: Source) -> SampleSet:
    rollout = Rollout(
        rollout_id="r",
        run_id="run",
        task="t",
        task_digest="",
        harness="h",
        group_id="g",
        index=0,
        seed=0,
        purpose="test",
    )
    return build_samples(build("a", recorded), rollout=rollout, source=source, policy=SamplePolicy())


async def two_turns(client: Client) -> dict[str, Any]:
    """An agent's loop: a call of a tool, its result, an answer. The last message."""
    first = await client.message(ask("List the files.", tools=TOOLS))
    messages = [
        {"role": "user", "content": "List the files."},
        first,
        {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a.txt"},
    ]
    return await client.message({"model": "teacher", "messages": messages, "tools": TOOLS})


async def test_a_streamed_answer_arrives_piece_by_piece(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with upstream(says("Hello!")) as fake, house(tmp_path, renderer, relay(renderer, fake)) as here:
        client = await here.client()
        got = await client.stream(ask("Hi.", stream_options={"include_usage": True}))
        assert (got.text, got.finish, got.done) == ("Hello!", "stop", True)
        assert [delta["content"] for delta in got.deltas if delta.get("content")] == list("Hello!")
        assert got.chunks[-1]["usage"] == {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
        (call,) = await here.calls()
    assert (call.status, call.finish_reason, call.off_policy) == (CallStatus.COMPLETE, FinishReason.STOP, "relay")
    assert call.answer is not None and call.answer.text == "Hello!"
    assert call.logprobs is None
    assert call.usage is not None and (call.usage.prompt_tokens, call.usage.cached_tokens) == (100, 60)
    assert call.timing.first_token is not None and call.timing.finished is not None
    # The ids are our own encoding: the template's text of the question and of this answer.
    assert renderer.decode(call.prompt.ids + call.sampled_ids) == (
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>"
    )


async def test_two_turns_make_one_row_for_sft(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with (
        upstream(calls(("bash", LS)), says("One file.")) as fake,
        house(tmp_path, renderer, relay(renderer, fake)) as here,
    ):
        client = await here.client()
        last = await two_turns(client)
        assert last["content"] == "One file."
        first, second = await here.calls()
        record = here.proxy.sessions.get("s1").record
    # Upstream sees its own call again, under the id that we gave it.
    sent = fake.bodies[1]["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": LS}
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]
    # The second prompt goes on from the first answer, id by id.
    assert second.parent_call_id == first.call_id
    begun = first.prompt.ids + first.sampled_ids
    assert second.prompt.ids[: len(begun)] == begun
    made = samples_of([first, second], Source.TEACHER)
    (sample,) = made.samples
    assert sample.source is Source.TEACHER and sample.logprobs is None
    assert sample.ids == second.prompt.ids + second.sampled_ids
    assert [renderer.decode(sample.ids[span.start : span.stop]) for span in sample.spans] == [
        f'<tool_call>\n{{"name": "bash", "arguments": {LS}}}\n</tool_call><|im_end|>',
        "One file.<|im_end|>",
    ]
    assert {span.state for span in sample.spans} == {"trained"}
    assert made.totals.trained == len(first.sampled_ids) + len(second.sampled_ids)
    # RL takes none of it, whoever claims that these are the policy's own tokens.
    claimed = samples_of([first, second], Source.POLICY)
    assert claimed.totals.masked == {"off_policy:relay": made.totals.trained}
    assert session_samples(record, [first, second]).samples[0].source is Source.TEACHER


async def test_an_anthropic_upstream(tmp_path: Path, renderer: ChatRenderer) -> None:
    tool = ({"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}}, [])
    argued = (tool[0], [{"type": "input_json_delta", "partial_json": part} for part in ('{"command"', ': "ls"}')])
    text = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "One file."}])
    async with (
        upstream(anthropic(argued, stop="tool_use"), anthropic(text)) as fake,
        house(tmp_path, renderer, relay(renderer, fake, "anthropic")) as here,
    ):
        client = await here.client(sampling=Sampling(max_tokens=400, seed=5))
        assert (await two_turns(client))["content"] == "One file."
        first, second = await here.calls()
    assert fake.paths == ["/v1/messages"] * 2
    assert fake.headers[0]["anthropic-version"] == "2023-06-01"
    assert first.usage is not None and first.usage.prompt_tokens == 45
    assert any("seed" in warning for warning in first.warnings)
    (sample,) = samples_of([first, second], Source.TEACHER).samples
    assert sample.trained_tokens == len(first.sampled_ids) + len(second.sampled_ids)


def tool(**fields: Any) -> dict[str, Any]:
    return {"name": "bash", "description": "Run.", **fields}


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION = {"functionDeclarations": [tool(parameters=SCHEMA)]}
DIALECTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "responses": (
        "/responses",
        {"model": "m", "input": "List.", "tools": [{"type": "function", **tool(parameters=SCHEMA)}]},
        {},
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 99,
            "messages": [{"role": "user", "content": "List."}],
            "tools": [tool(input_schema=SCHEMA)],
        },
        {"anthropic-version": "2023-06-01"},
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "List."}]}], "tools": [FUNCTION]},
        {},
    ),
}


async def speak(here: House, dialect: str, *, streamed: bool) -> tuple[int, str]:
    """Ask in a dialect; status and the whole text of what came back."""
    session = await here.sessions.open(
        f"{dialect}-{streamed}",
        sampling=Sampling(max_tokens=400),
        limits=NO_LIMITS,
        metadata={},
        template_kwargs={},
    )
    path, body, headers = DIALECTS[dialect]
    if dialect == "gemini" and streamed:
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
    elif streamed:
        body = {**body, "stream": True}
    headers = {**headers, "Authorization": f"Bearer {session.key}"}
    async with here.http.post(session.base_urls[dialect] + path, json=body, headers=headers) as response:
        text = await response.text()
        if streamed and response.status == 200:
            events = SseReader().feed(text.encode() + b"\n\n")
            assert len(events) > 1
        return response.status, text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_in(tmp_path: Path, renderer: ChatRenderer, dialect: str, streamed: bool) -> None:
    async with (
        upstream(calls(("bash", LS))) as fake,
        house(tmp_path, renderer, relay(renderer, fake)) as here,
    ):
        status, text = await speak(here, dialect, streamed=streamed)
        (call,) = await here.calls(f"{dialect}-{streamed}")
    assert status == 200, text
    assert "bash" in text and "ls" in text
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "List."}]
    assert fake.bodies[0]["tools"][0]["function"]["name"] == "bash"
    assert call.dialect == dialect and call.answer is not None
    assert [(named.name, json.loads(named.arguments)) for named in call.answer.tool_calls] == [
        ("bash", {"command": "ls"})
    ]
    assert renderer.decode(call.sampled_ids).startswith("<tool_call>")


OVERFLOW = {"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum", "type": "invalid_request_error"}}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_errors_in_every_dialect(tmp_path: Path, renderer: ChatRenderer, dialect: str) -> None:
    faults = [refuse(400, OVERFLOW), refuse(401, {"error": {"message": f"bad key {KEY}"}}), refuse(500)]
    async with upstream(*faults) as fake, house(tmp_path, renderer, relay(renderer, fake, retries=0)) as here:
        status, text = await speak(here, dialect, streamed=False)
        assert status == 400 and "210000" in text and "200000" in text
        (call,) = await here.calls(f"{dialect}-False")
        assert call.status is CallStatus.ERROR and not call.sampled_ids
        status, text = await speak(here, dialect, streamed=True)
        assert status >= 500 and "key_env" in text and KEY not in text
    async with upstream(*faults[2:]) as fake, house(tmp_path / "b", renderer, relay(renderer, fake, retries=0)) as here:
        status, text = await speak(here, dialect, streamed=False)
        assert status >= 500 and "HTTP 500" in text


async def test_an_overloaded_upstream_says_when_to_come_back(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with (
        upstream(refuse(429, Retry_After="77")) as fake,
        house(tmp_path, renderer, relay(renderer, fake, timeout_s=5)) as here,
    ):
        reply = await (await here.client()).post(ask())
    assert (reply.status, reply.headers["Retry-After"], len(fake.bodies)) == (429, "77", 1)


async def test_a_cut_stream_is_not_a_short_answer(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with (
        upstream(stream(chunk({"content": "half"}), cut=True)) as fake,
        house(tmp_path, renderer, relay(renderer, fake)) as here,
    ):
        client = await here.client()
        got = await client.stream(ask())
        assert (got.text, got.done, got.cut or got.error is not None) == ("half", False, True)
        (call,) = await here.calls()
    assert call.status is CallStatus.ERROR
    assert call.answer is not None and call.answer.text == "half"
    # What was not finished is not encoded: nobody knows how it would have gone on.
    assert call.sampled_ids == ()
    assert samples_of([call], Source.TEACHER).totals.sampled == 0


async def test_a_client_that_leaves_ends_the_upstream_request(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with (
        upstream(says("x" * 200, delay=0.02)) as fake,
        house(tmp_path, renderer, relay(renderer, fake)) as here,
    ):
        client = await here.client()
        timeout = aiohttp.ClientTimeout(total=0.3)
        with pytest.raises(TimeoutError):
            async with here.http.post(
                client.url, json=ask(stream=True), headers=client.headers, timeout=timeout
            ) as response:
                await response.read()
        await eventually(lambda: fake.running == 0)
        await eventually(lambda: not here.proxy.sessions.get("s1").in_flight)
        (call,) = await here.calls()
    assert call.status is CallStatus.ABORTED and call.sampled_ids == ()


async def test_stop_strings_and_cut_answers(tmp_path: Path, renderer: ChatRenderer) -> None:
    cut_call = [
        {"tool_calls": [{"index": 0, "id": "i", "function": {"name": "bash", "arguments": '{"comm'}}]},
    ]
    async with (
        upstream(
            says("one END two"), openai({"content": "so far"}, finish="length"), openai(*cut_call, finish="length")
        ) as fake,
        house(tmp_path, renderer, relay(renderer, fake)) as here,
    ):
        client = await here.client()
        assert (await client.message(ask("a", stop=["END"])))["content"] == "one "
        assert (await client.post(ask("b"))).body["choices"][0]["finish_reason"] == "length"
        assert (await client.post(ask("c", tools=TOOLS))).status == 200
        stopped, cut, inside = await here.calls()
    assert "stop" not in fake.bodies[0]  # our own business: OpenAI's answer would not say which one it was
    assert stopped.finish_reason is FinishReason.STOP_STRING
    assert renderer.decode(stopped.sampled_ids) == "one "
    assert renderer.decode(cut.sampled_ids) == "so far"  # no closing that nobody wrote
    assert inside.sampled_ids == () and any("cut inside a tool call" in warning for warning in inside.warnings)
    assert inside.answer is not None and inside.answer.tool_calls[0].arguments == '{"comm'


async def test_limits_of_the_session_hold(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with upstream(says("Hello!")) as fake, house(tmp_path, renderer, relay(renderer, fake)) as here:
        client = await here.client(limits=Limits(calls=None, sampled_tokens=10))
        assert (await client.post(ask())).status == 200
        assert (await client.post(ask("more"))).status == 200
        assert [body["max_tokens"] for body in fake.bodies] == [10, 3]  # 7 of 10 were used by the first
        assert (await client.post(ask("even more"))).status == 403


async def test_what_our_template_cannot_write_is_answered_all_the_same(tmp_path: Path, renderer: ChatRenderer) -> None:
    image = base64.b64encode(PNG).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    body = ask(messages=[{"role": "user", "content": [{"type": "text", "text": "See?"}, picture]}])
    async with upstream(says("A cat.")) as fake, house(tmp_path, renderer, relay(renderer, fake)) as here:
        assert (await (await here.client()).message(body))["content"] == "A cat."
        (call,) = await here.calls()
    assert fake.bodies[0]["messages"][0]["content"][1] == picture
    assert call.conversation.messages[0].parts[1].sha256 == hashlib.sha256(PNG).hexdigest()  # type: ignore[union-attr]
    assert (call.prompt.ids, call.sampled_ids) == ((), ())
    assert any(warning.startswith("not encoded") for warning in call.warnings)
    made = samples_of([call], Source.TEACHER)
    assert made.totals.sampled == 0 and not any(sample.trained_tokens for sample in made.samples)


async def test_the_key_is_in_no_file_and_no_log(
    tmp_path: Path, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    echoing = {"error": {"message": f"you sent {KEY}"}}
    plays = [
        openai({"content": f"it is {KEY}"}),
        refuse(401, echoing),
        refuse(400, echoing),
        refuse(500, echoing),
        refuse(429, echoing),
    ]
    told = ""
    async with upstream(*plays) as fake, house(tmp_path, renderer, relay(renderer, fake, retries=0)) as here:
        client = await here.client()
        for at in range(len(plays)):
            told += json.dumps((await client.post(ask(str(at)))).body)
        told += json.dumps((await here.control("GET", "/v1/sessions/s1/calls")).body)
        assert len(fake.bodies) == len(plays)
        assert all(headers["authorization"] == f"Bearer {KEY}" for headers in fake.headers)
    assert "it is" in told and KEY not in told
    assert KEY not in caplog.text
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    # Blobs may be packed; what can be read out of them has none either.
    with sqlite3.connect(tmp_path / "run.sqlite") as database:
        dump = "\n".join(database.iterdump())
    database.close()
    assert KEY not in dump and KEY.encode().hex() not in dump.lower()


async def test_calls_at_once_in_one_session(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with upstream(says("ok", delay=0.01)) as fake, house(tmp_path, renderer, relay(renderer, fake)) as here:
        client = await here.client()
        replies = await asyncio.gather(*(client.message(ask(f"question {at}")) for at in range(8)))
        assert {reply["content"] for reply in replies} == {"ok"}
        recorded = await here.calls()
        await here.proxy._gateway.engine.close()
    assert len({call.call_id for call in recorded}) == 8
    assert all(renderer.decode(call.sampled_ids) == "ok<|im_end|>" for call in recorded)


async def test_an_error_event_before_any_piece_is_tried_again(tmp_path: Path, renderer: ChatRenderer) -> None:
    broken = stream(data({"error": {"message": "busy", "type": "server_error"}}))
    async with upstream(broken, says("fine")) as fake, house(tmp_path, renderer, relay(renderer, fake)) as here:
        assert (await (await here.client()).message(ask()))["content"] == "fine"
