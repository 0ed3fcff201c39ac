"""Everything that can go wrong with a call: what the client is told, and what is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openforgerl.errors import StoreError, TemplateError
from openforgerl.proxy import ProxyOptions, ProxyServer
from openforgerl.rendering import ChatRenderer
from openforgerl.store import CallStore, Database
from openforgerl.types import (
    CallStatus,
    Chunk,
    FinishReason,
    Limits,
    ModelCall,
    OpenedSession,
    Prompt,
    Sampling,
    ThreadRole,
)

from .house import TOOLS, Client, GatedEngine, StuckRenderer, ask, eventually, house, scripted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        ({"status": 500}, 500, "engine_error", None),
        ({"status": 503}, 503, "engine_error", None),
        ({"status": 429, "retry_after": 2.5}, 429, "rate_limit_exceeded", "3"),
        ({"status": 503, "retry_after": 4}, 503, "engine_error", "4"),
        ({"status": 429}, 429, "rate_limit_exceeded", "1"),
    ],
)
async def test_an_engine_that_fails_before_the_first_token(
    tmp_path: Path,
    renderer: ChatRenderer,
    stream: bool,
    error: dict[str, Any],
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"error": error}, {"text": "ok"})) as home:
        client = await home.client()
        reply = await client.post(ask(stream=stream))
        again = await client.message(ask())
        failed, good = await home.calls()
    assert (reply.status, reply.body["error"]["code"]) == (status, code)
    assert reply.headers.get("Retry-After") == retry_after
    assert (failed.status, failed.finish_reason, failed.sampled_ids) == (CallStatus.ERROR, FinishReason.ERROR, ())
    assert (failed.error or "").startswith(code)
    assert failed.answer is None
    assert (again["content"], good.status) == ("ok", CallStatus.COMPLETE)


async def test_an_engine_that_fails_mid_answer(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = scripted(renderer, {"text": "one two three four five", "cut_after_tokens": 6, "times": 0})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        got = await client.stream(ask())
        whole = await client.post(ask())
        first, second = await home.calls()
    # An error event, no end mark, no finish reason, and the connection is cut: nobody takes it for an answer.
    assert got.error is not None
    assert got.error["code"] == "engine_error"
    # There is no status in the middle of a stream: the words are what pi and OpenClaw try again for.
    assert got.error["message"] == "server error 500: the script cuts this answer after 6 tokens"
    assert (got.done, got.cut, got.finish) == (False, True, None)
    assert got.text and "one two three four five".startswith(got.text)
    assert (whole.status, whole.body["error"]["code"]) == (500, "engine_error")
    for call in (first, second):
        assert (call.status, len(call.sampled_ids)) == (CallStatus.ERROR, 6)
    assert first.answer is not None
    assert first.answer.text.startswith(got.text)


@pytest.mark.parametrize("parting_s", [0.4, 60.0])
async def test_a_client_has_time_to_read_the_error(tmp_path: Path, renderer: ChatRenderer, parting_s: float) -> None:
    """Whoever reads it closes; whoever does not is cut in the end."""
    engine = scripted(renderer, {"text": "one two three four five", "cut_after_tokens": 6, "times": 0})
    async with house(tmp_path, renderer, engine, parting_s=parting_s) as home:
        client = await home.client()
        events = client.events(ask())
        async for data in events:
            if "error" in json.loads(data):
                break
        read = time.monotonic()
        if parting_s == 60.0:
            await events.aclose()
            live = home.proxy.sessions.get(client.session.session_id)
            await eventually(lambda: not live.tasks)
            assert time.monotonic() - read < 5
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await anext(events)
            assert 0.3 < time.monotonic() - read < 5


async def test_context_overflow(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "ok"}, context_length=300)) as home:
        client = await home.client()
        long = await client.post(ask("word " * 400, stream=True))
        short = await client.message(ask("short"))
        over, good = await home.calls()
    assert (long.status, long.body["error"]["code"]) == (400, "context_length_exceeded")
    assert (over.status, over.sampled_ids) == (CallStatus.ERROR, ())
    assert len(over.prompt.ids) >= 300
    assert short["content"] == "ok"
    # What the context has left is one of the bounds.
    assert good.sampling_applied.max_tokens == min(300 - len(good.prompt.ids), 400)


async def test_a_conversation_that_the_template_refuses(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, RefusingRenderer(renderer), GatedEngine(())) as home:
        reply = await (await home.client()).post(ask())
        calls = await home.calls()
    assert reply.status == 400
    assert reply.body["error"] == {
        "message": "messages: Only one system message, please.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "template_error",
    }
    assert calls == []


class RefusingRenderer:
    """A renderer whose template raises."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, *given: Any, **fields: Any) -> Prompt:
        raise TemplateError("Only one system message, please.")


async def test_a_long_prompt_holds_up_no_other_session(tmp_path: Path, renderer: ChatRenderer) -> None:
    stuck = StuckRenderer(renderer)
    async with house(tmp_path, stuck, scripted(renderer, {"text": "a", "times": 0})) as home:
        client, other = await home.client(), await home.client("s2")
        asked = [asyncio.create_task(client.post(ask("word " * 5000, tools=TOOLS)))]
        await eventually(stuck.rendering.is_set)
        assert (await other.message(ask("short")))["content"] == "a"
        # Its own session keeps its order: the next call waits to be told apart from the first.
        asked.append(asyncio.create_task(client.post(ask("short", tools=TOOLS))))
        await eventually(lambda: home.proxy.sessions.get("s1").in_flight == 2)
        assert await home.calls() == []
        stuck.let_go.set()
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200]
        first, second = await home.calls()
    assert (first.index, first.role, second.index) == (0, ThreadRole.MAIN, 1)
    assert len(first.prompt.ids) > len(second.prompt.ids)
    assert second.thread != first.thread


class OddEngine(GatedEngine):
    """Does what an engine must not do: ends without a finish reason, or breaks with a bug."""

    def __init__(self, ids: tuple[int, ...], error: Exception | None) -> None:
        super().__init__(ids, free=True)
        self.error = error

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
        yield Chunk(ids=self.ids, logprobs=None, weights_version=0)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "code"), [(None, "engine_error"), (ZeroDivisionError("secret detail"), "internal_error")]
)
async def test_bugs_are_recorded_and_told_without_detail(
    tmp_path: Path, renderer: ChatRenderer, error: Exception | None, code: str
) -> None:
    async with house(tmp_path, renderer, OddEngine(renderer.encode("ab"), error)) as home:
        reply = await (await home.client()).post(ask())
        (call,) = await home.calls()
    assert (reply.status, reply.body["error"]["code"]) == (500, code)
    assert "secret" not in json.dumps(reply.body)
    assert call.status is CallStatus.ERROR
    assert call.sampled_ids == renderer.encode("ab")
    assert (error is None) or "ZeroDivisionError: secret detail" in (call.error or "")


class FailingStore(CallStore):
    """A store that cannot write finished calls."""

    async def finish(self, call: ModelCall) -> None:
        raise StoreError("disk full")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_recorded_is_not_answered(tmp_path: Path, renderer: ChatRenderer, stream: bool) -> None:
    engine = scripted(renderer, {"text": "a b c"})
    async with (
        Database.open(tmp_path / "run.sqlite") as database,
        ProxyServer(engine=engine, renderer=renderer, store=FailingStore(database), options=ProxyOptions()) as proxy,
        aiohttp.ClientSession() as http,
    ):
        _, key = await proxy.sessions.open("s", sampling=Sampling(), limits=Limits(), metadata={}, template_kwargs={})
        url = proxy.base_urls("s")["chat"] + "/chat/completions"
        body = b""
        with pytest.raises(aiohttp.ClientPayloadError) if stream else contextlib.nullcontext():
            async with http.post(url, json=ask(stream=stream), headers={"Authorization": f"Bearer {key}"}) as response:
                async for piece in response.content.iter_any():
                    body += piece
    assert b"store_error" in body
    assert b"[DONE]" not in body
    assert b'"finish_reason":"stop"' not in body


async def test_identical_requests_are_separate_calls(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "one"}, {"text": "two"})) as home:
        client = await home.client()
        answers = [await client.message(ask(tools=TOOLS)) for _ in range(2)]
        first, second = await home.calls()
    assert [answer["content"] for answer in answers] == ["one", "two"]
    assert first.call_id != second.call_id
    assert first.thread == second.thread
    assert second.parent_call_id is None


async def test_closing_the_proxy_mid_stream(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with Database.open(tmp_path / "run.sqlite") as database:
        store = CallStore(database)
        proxy = ProxyServer(engine=engine, renderer=renderer, store=store, options=ProxyOptions())
        await proxy.start()
        session, key = await proxy.sessions.open(
            "s", sampling=Sampling(), limits=Limits(), metadata={}, template_kwargs={}
        )
        async with aiohttp.ClientSession() as http:
            client = Client(http, OpenedSession(session_id="s", key=key, base_urls=proxy.base_urls("s")))
            asked = asyncio.create_task(client.stream(ask()))
            engine.allow(2)
            await eventually(lambda: engine.sampled == 2)
            await asyncio.wait_for(proxy.close(), 5)
            got = await asked
        (call,) = await store.calls("s")
    assert got.error is not None
    assert got.error["code"] == "shutting_down"
    assert (call.status, call.error, call.sampled_ids) == (CallStatus.ABORTED, "proxy_shutdown", engine.ids[:2])
    assert session.in_flight == 0


@pytest.mark.parametrize("levels", [129, 600, 900, 3000])
async def test_a_body_nested_too_deeply_is_refused_and_poisons_nothing(
    tmp_path: Path, renderer: ChatRenderer, levels: int
) -> None:
    """What can be recorded but not read back would make the whole session, and the next start, fail."""
    nested = "[" * levels + "]" * levels
    body = json.dumps(ask(metadata={"x": "@"})).replace('"@"', nested).encode()
    async with house(tmp_path, renderer, scripted(renderer, {"text": "ok"})) as home:
        client = await home.client()
        deep = await client.post(body)
        plain = await client.post(ask())
        samples = await home.control("GET", "/v1/sessions/s1/samples")
        calls = await home.control("GET", "/v1/sessions/s1/calls")
    assert (deep.status, plain.status, samples.status, calls.status) == (400, 200, 200, 200)
    assert "nested too deeply" in deep.body["error"]["message"]


@pytest.mark.parametrize("levels", [600, 3000])
async def test_an_answer_whose_arguments_never_close_is_answered_on(
    tmp_path: Path, renderer: ChatRenderer, levels: int
) -> None:
    raw = '<tool_call>\n{"name": "bash", "arguments": {"a": ' + "[" * levels + "]" * levels + "}}\n</tool_call>"
    engine = scripted(renderer, {"raw": raw, "chunk_tokens": 500}, {"text": "ok"})
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(sampling=Sampling(max_tokens=8192))
        first = await client.message(ask(tools=TOOLS))
        told = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "no such arguments"}
        history = [*ask()["messages"], first, told]
        second = await client.post({"messages": history, "tools": TOOLS})
    assert second.status == 200


class SlowToBegin(CallStore):
    """A disk that takes its time over intents."""

    async def begin(self, call: ModelCall) -> None:
        await asyncio.sleep(0.2)
        await super().begin(call)


async def test_the_first_requests_of_a_session_may_come_together(tmp_path: Path, renderer: ChatRenderer) -> None:
    """A title request beside the first turn, and a retry of it: whoever is still being recorded is known already."""
    title = {"messages": [{"role": "system", "content": "You are a title generator."}, *ask()["messages"]]}
    engine = scripted(renderer, {"text": "ok", "times": 0})
    async with house(tmp_path, renderer, engine, store=SlowToBegin) as home:
        client = await home.client()
        await asyncio.gather(client.post(title), client.post(ask("Go.")), client.post(ask("Go.")))
        roles = sorted(call.role.value for call in await home.calls())
    assert roles == ["main", "main", "side"]


class OnceRefusing(RefusingRenderer):
    """A renderer whose template raises for the first conversation only."""

    def render(self, *given: Any, **fields: Any) -> Prompt:
        self.render = self._renderer.render
        return super().render(*given, **fields)


class OnceFull(CallStore):
    """A store that cannot write the first intent."""

    async def begin(self, call: ModelCall) -> None:
        self.begin = super().begin
        raise StoreError("disk full")


@pytest.mark.parametrize(("refusing", "store", "status"), [(True, CallStore, 400), (False, OnceFull, 500)])
async def test_a_first_request_that_is_not_recorded_leaves_the_opening_to_the_next(
    tmp_path: Path, renderer: ChatRenderer, refusing: bool, store: type[CallStore], status: int
) -> None:
    chosen = OnceRefusing(renderer) if refusing else renderer
    engine = scripted(renderer, {"text": "ok", "times": 0})
    async with house(tmp_path, chosen, engine, store=store) as home:
        client = await home.client()
        first, second = await client.post(ask("Not this.")), await client.post(ask("But this."))
        (call,) = await home.calls()
    assert (first.status, second.status) == (status, 200)
    assert (call.role.value, call.thread) == ("main", "main")


class SlowlyFinishing(CallStore):
    """A disk that takes its time over finished calls."""

    finishing = 0

    async def finish(self, call: ModelCall) -> None:
        self.finishing += 1
        await asyncio.sleep(0.5)
        await super().finish(call)


async def test_a_request_whose_body_ends_while_the_proxy_closes_begins_nothing(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    """Closing waits for the record of one call; meanwhile the body of another request is complete."""
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with Database.open(tmp_path / "run.sqlite") as database:
        store = SlowlyFinishing(database)
        options = ProxyOptions(shutdown_timeout_s=0.2)
        proxy = ProxyServer(engine=engine, renderer=renderer, store=store, options=options)
        await proxy.start()
        session, key = await proxy.sessions.open(
            "s", sampling=Sampling(), limits=Limits(calls=None, concurrent=4), metadata={}, template_kwargs={}
        )
        body, more = json.dumps(ask("late")).encode(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await more.wait()
            yield body[10:]

        async with aiohttp.ClientSession() as http:
            client = Client(http, OpenedSession(session_id="s", key=key, base_urls=proxy.base_urls("s")))
            first = asyncio.create_task(client.post(ask()))
            await eventually(lambda: engine.running == 1)
            late = asyncio.create_task(http.post(client.url, data=slowly(), headers=client.headers))
            await asyncio.sleep(0.1)  # the head and the first bytes are read
            closing = asyncio.create_task(proxy.close())
            await eventually(lambda: store.finishing == 1)
            more.set()
            (answered,) = await asyncio.gather(late, return_exceptions=True)
            await asyncio.wait_for(closing, 5)
            calls = await store.calls("s")
            assert (await first).body["error"]["code"] == "shutting_down"
            assert [(call.status, call.error) for call in calls] == [(CallStatus.ABORTED, "proxy_shutdown")]
            assert isinstance(answered, aiohttp.ClientResponse)
            assert (answered.status, answered.headers["Retry-After"]) == (503, "5")
            assert (await answered.json())["error"]["code"] == "shutting_down"
    assert (session.in_flight, session.tasks) == (0, ())
