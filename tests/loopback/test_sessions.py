"""Keys, limits, sealing and time: who may call, how much, for how long. In process and over HTTP alike."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from openforgerl.errors import InputError, StoreError
from openforgerl.protocols import Sessions
from openforgerl.proxy import HttpSessions
from openforgerl.rendering import ChatRenderer
from openforgerl.store import CallStore
from openforgerl.types import CallStatus, FinishReason, Limits, ModelCall, Sampling, SessionState

from .house import Client, GatedEngine, House, ask, eventually, house, scripted


@asynccontextmanager
async def sessions_of(home: House, how: str) -> AsyncGenerator[Sessions]:
    if how == "in process":
        yield home.sessions
    else:
        async with home.http_sessions() as sessions:
            yield sessions


HOW = pytest.mark.parametrize("how", ["in process", "over HTTP"])


async def opened(sessions: Sessions, session_id: str = "s1", limits: Limits | None = None) -> None:
    await sessions.open(
        session_id, sampling=Sampling(), limits=limits or Limits(), metadata={"task": "t"}, template_kwargs={"a": 1}
    )


@HOW
async def test_the_sessions_contract(tmp_path: Path, renderer: ChatRenderer, how: str) -> None:
    engine = scripted(renderer, {"text": "one"}, {"text": "two"})
    async with house(tmp_path, renderer, engine) as home, sessions_of(home, how) as sessions:
        sampling = Sampling(temperature=0.5, max_tokens=77, seed=3)
        session = await sessions.open(
            "run-1.a2", sampling=sampling, limits=Limits(calls=5), metadata={"task": "t"}, template_kwargs={"x": [1]}
        )
        (record,) = await home.store.sessions()
        assert (record.session_id, record.sampling, record.limits) == ("run-1.a2", sampling, Limits(calls=5))
        assert (record.metadata, record.template_kwargs) == ({"task": "t"}, {"x": [1]})
        # 256 bits, of which only the hash is kept.
        assert len(bytes.fromhex(session.key)) == 32
        assert record.key_sha256 == hashlib.sha256(session.key.encode()).hexdigest()
        host, port = home.proxy.data_address
        below = f"http://{host}:{port}/s/run-1.a2"
        assert session.base_urls == {
            "chat": f"{below}/v1",
            "responses": f"{below}/v1",
            "messages": below,
            "gemini": below,
        }

        assert list(await sessions.calls("run-1.a2")) == []
        client = Client(home.http, session)
        await client.message(ask("one"))
        await client.message(ask("two"))
        assert list(await sessions.calls("run-1.a2")) == await home.store.calls("run-1.a2")

        await sessions.seal("run-1.a2")
        await sessions.seal("run-1.a2")
        (record,) = await home.store.sessions()
        assert record.state is SessionState.SEALED
        refused = await client.post(ask())
        assert (refused.status, refused.body["error"]["code"]) == (403, "session_closed")
        assert len(await sessions.calls("run-1.a2")) == 2


@HOW
async def test_what_the_contract_refuses(tmp_path: Path, renderer: ChatRenderer, how: str) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home, sessions_of(home, how) as sessions:
        await opened(sessions)
        with pytest.raises(InputError, match="exists already"):
            await opened(sessions)
        for bad in ("", "..", ".x", "a/b", "a b", "é", "x" * 129):
            with pytest.raises(InputError, match="session_id must be"):
                await opened(sessions, bad)
        with pytest.raises(InputError, match="there is no session 'nobody'"):
            await sessions.seal("nobody")
        with pytest.raises(InputError, match="there is no session 'nobody'"):
            await sessions.calls("nobody")


@HOW
async def test_sealing_stops_what_runs_and_waits_for_its_record(
    tmp_path: Path, renderer: ChatRenderer, how: str
) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home, sessions_of(home, how) as sessions:
        client = await home.client(limits=Limits(calls=None, concurrent=2))
        streams = [asyncio.create_task(client.stream(ask(text))) for text in ("a", "b", "waits")]
        await eventually(lambda: engine.running == 2)
        engine.allow(4)
        await eventually(lambda: engine.sampled == 4)
        await sessions.seal("s1")
        calls = await sessions.calls("s1")
        assert [call.status for call in calls] == [CallStatus.ABORTED] * 2
        assert sum(len(call.sampled_ids) for call in calls) == 4
        assert all((call.finish_reason, call.error) == (FinishReason.ABORTED, "session_sealed") for call in calls)
        assert engine.running == 0
        got = await asyncio.gather(*streams, return_exceptions=True)
    for stream in got[:2]:
        assert not isinstance(stream, BaseException)
        assert (stream.done, stream.cut) == (False, True)
        assert stream.error is not None
        assert stream.error["code"] == "session_closed"
    # The one that waited for a place had no stream yet, so it gets a plain 403.
    assert isinstance(got[2], AssertionError)
    assert "session_closed" in str(got[2])


class SlowStore(CallStore):
    """A disk that takes its time over finished calls."""

    async def finish(self, call: ModelCall) -> None:
        await asyncio.sleep(0.3)
        await super().finish(call)


async def test_sealing_waits_for_a_slow_disk(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with house(tmp_path, renderer, engine, store=SlowStore) as home:
        client = await home.client()
        asked = asyncio.create_task(client.post(ask()))
        engine.allow(2)
        await eventually(lambda: engine.sampled == 2)
        await asyncio.gather(home.proxy.sessions.seal("s1"), home.proxy.sessions.seal("s1"))
        (call,) = await home.store.calls("s1")
        assert (call.status, len(call.sampled_ids)) == (CallStatus.ABORTED, 2)
        assert (await asked).status == 403


async def test_a_second_sealing_waits_as_well(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with house(tmp_path, renderer, engine, store=SlowStore) as home:
        client = await home.client()
        asked = asyncio.create_task(client.post(ask()))
        await eventually(lambda: engine.running == 1)
        first = asyncio.create_task(home.proxy.sessions.seal("s1"))
        await asyncio.sleep(0.05)
        await home.proxy.sessions.seal("s1")
        (call,) = await home.store.calls("s1")
        assert call.status is CallStatus.ABORTED
        await asyncio.gather(first, asked)


class FailingOnceStore(CallStore):
    """A disk that is full when the first session is sealed."""

    failed = False

    async def seal_session(self, session_id: str, at: float) -> None:
        if not self.failed:
            self.failed = True
            raise StoreError("no space left")
        await super().seal_session(session_id, at)


async def test_a_sealing_that_failed_can_be_done_again(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer), store=FailingOnceStore) as home:
        client = await home.client()
        with pytest.raises(StoreError, match="no space left"):
            await home.proxy.sessions.seal("s1")
        assert (await client.post(ask())).body["error"]["code"] == "session_closed"
        await home.proxy.sessions.seal("s1")
        (record,) = await home.store.sessions()
    assert record.state is SessionState.SEALED


async def test_a_sealing_that_was_cancelled_can_be_done_again(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with house(tmp_path, renderer, engine, store=SlowStore) as home:
        client = await home.client()
        asked = asyncio.create_task(client.post(ask()))
        await eventually(lambda: engine.running == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await home.proxy.sessions.seal("s1")
        await home.proxy.sessions.seal("s1")
        (record,) = await home.store.sessions()
        assert record.state is SessionState.SEALED
        assert (await asked).status == 403


async def test_a_slow_client_cannot_hold_up_sealing(tmp_path: Path, renderer: ChatRenderer) -> None:
    ids = renderer.encode("word " * 50)
    engine = GatedEngine(ids * 400, free=True)
    engine.context_length = 10**6
    async with house(tmp_path, renderer, engine, shutdown_timeout_s=0.2) as home:
        client = await home.client(sampling=Sampling(max_tokens=10**6))
        async with home.http.post(client.url, json=ask(stream=True), headers=client.headers) as response:
            await response.content.readany()
            async with asyncio.timeout(5):
                await home.proxy.sessions.seal("s1")
        (call,) = await home.calls()
    assert call.status is CallStatus.ABORTED


async def test_the_limit_on_calls(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        client = await home.client(limits=Limits(calls=2))
        assert [(await client.post(ask())).status for _ in range(2)] == [200, 200]
        reply = await client.post(ask())
        other = await home.client("s2", limits=Limits(calls=2))
        assert (await other.post(ask())).status == 200
    assert (reply.status, reply.body["error"]["code"], reply.body["error"]["param"]) == (
        403,
        "session_limit",
        "limits.calls",
    )
    assert "2 model calls" in reply.body["error"]["message"]


async def test_the_limit_on_sampled_tokens(tmp_path: Path, renderer: ChatRenderer) -> None:
    ids = renderer.encode("a b c d e f g h")
    engine = GatedEngine(ids, free=True)
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, sampled_tokens=len(ids) + 3))
        first = await client.post(ask())
        second = await client.post(ask())
        third = await client.post(ask())
        one, two = await home.calls()
    assert first.body["choices"][0]["finish_reason"] == "stop"
    # The bound also reaches the engine, and an engine that ignores it is cut.
    assert two.sampling_applied.max_tokens == 3
    assert second.body["choices"][0]["finish_reason"] == "length"
    assert (len(one.sampled_ids), len(two.sampled_ids)) == (len(ids), 3)
    assert two.finish_reason is FinishReason.LENGTH
    assert (third.status, third.body["error"]["param"]) == (403, "limits.sampled_tokens")


async def test_a_call_that_waited_finds_the_tokens_used_up(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("a b c d"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, sampled_tokens=len(engine.ids), concurrent=1))
        first = asyncio.create_task(client.post(ask()))
        await eventually(lambda: engine.running == 1)
        second = asyncio.create_task(client.post(ask()))
        await eventually(lambda: home.proxy.sessions.get("s1").in_flight == 2)
        engine.allow(100)
        assert (await first).status == 200
        assert (await second).body["error"]["param"] == "limits.sampled_tokens"
        assert len(await home.calls()) == 1


async def test_concurrent_calls_share_the_limit_on_sampled_tokens(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("a b c d e f g h"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, sampled_tokens=10))
        asked = [asyncio.create_task(client.post(ask(str(n)))) for n in range(4)]
        await eventually(lambda: engine.running == 4)
        engine.allow(1000)
        await asyncio.gather(*asked)
        calls = await home.calls()
    # Each of the four may have had one id on its way when the last one was counted.
    assert 10 <= sum(len(call.sampled_ids) for call in calls) <= 13


async def test_calls_beyond_the_concurrent_limit_wait_in_order(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("a<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, concurrent=2))
        live = home.proxy.sessions.get("s1")
        asked: list[asyncio.Task[object]] = []
        for number in range(6):
            asked.append(asyncio.create_task(client.message(ask(str(number)))))
            await eventually(lambda seen=number: live.in_flight == seen + 1)
        assert engine.running == 2
        engine.allow(100)
        await asyncio.gather(*asked)
        calls = await home.calls()
    assert [call.conversation.messages[0].text for call in calls] == ["0", "1", "2", "3", "4", "5"]


async def test_time_runs_out(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = GatedEngine(renderer.encode("one two<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, seconds=0.4))
        engine.allow(1)
        got = await asyncio.wait_for(client.stream(ask()), 5)
        late = await client.post(ask())
        (call,) = await home.calls()
    assert got.error is not None
    assert got.error["code"] == "session_closed"
    assert (call.status, call.error, len(call.sampled_ids)) == (CallStatus.ABORTED, "session_deadline", 1)
    assert (late.status, late.body["error"]["code"]) == (403, "session_closed")


async def test_thirty_sessions_at_once_are_kept_apart(tmp_path: Path, renderer: ChatRenderer) -> None:
    answers = [{"match": f"^number {n} ", "text": f"answer {n} " * 5, "times": 0, "delay_s": 0.001} for n in range(30)]
    async with house(tmp_path, renderer, scripted(renderer, *answers)) as home:
        clients = [await home.client(f"s{n}") for n in range(30)]

        async def talk(n: int) -> None:
            for turn in range(3):
                got = await clients[n].stream(ask(f"number {n} turn {turn}"))
                assert (got.text, got.done) == (f"answer {n} " * 5, True)

        await asyncio.gather(*(talk(n) for n in range(30)))
        for n in range(30):
            calls = await home.calls(f"s{n}")
            assert [call.index for call in calls] == [0, 1, 2]
            for turn, call in enumerate(calls):
                assert call.status is CallStatus.COMPLETE
                assert call.conversation.messages[0].text == f"number {n} turn {turn}"
                assert f"answer {n} " in renderer.decode(call.sampled_ids)


async def test_an_unreachable_or_foreign_control_port(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        async with HttpSessions(home.control_url, "x" * 64) as sessions:
            with pytest.raises(InputError, match="control token"):
                await sessions.calls("s1")
        host, port = home.proxy.data_address
        async with HttpSessions(f"http://{host}:{port}", home.token) as sessions:
            with pytest.raises(InputError, match="is not served here"):
                await sessions.calls("s1")
        url = home.control_url
    async with HttpSessions(url, "x" * 64) as sessions:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await sessions.calls("s1")
