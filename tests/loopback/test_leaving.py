"""Clients that leave, stop reading, or hang up late: what runs on, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus, FinishReason, Limits, Sampling, ThreadRole

from .house import GatedEngine, StuckRenderer, ask, eventually, house, scripted


async def test_a_client_that_leaves_while_its_prompt_is_made_leaves_no_trace(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    stuck = StuckRenderer(renderer)
    async with house(tmp_path, stuck, scripted(renderer, {"text": "a", "times": 0})) as home:
        client = await home.client(limits=Limits(concurrent=1))
        asked = asyncio.create_task(client.post(ask("word " * 5000)))
        await eventually(stuck.rendering.is_set)
        asked.cancel()
        await eventually(lambda: home.proxy.sessions.get("s1").in_flight == 0)
        assert (await client.message(ask("short")))["content"] == "a"
        stuck.let_go.set()
        (call,) = await home.calls()
    assert call.role is ThreadRole.MAIN


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_generation(
    tmp_path: Path, renderer: ChatRenderer, stream: bool
) -> None:
    engine = GatedEngine(renderer.encode("one two three<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client()
        asked = asyncio.create_task(client.stream(ask()) if stream else client.post(ask()))
        engine.allow(3)
        await eventually(lambda: engine.sampled == 3)
        await asyncio.sleep(0.02)  # the third is on its way
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: engine.closed_early == 1)
        await home.proxy.sessions.seal("s1")
        (call,) = await home.calls()
    assert engine.sampled == 3
    assert (call.status, call.finish_reason, call.error) == (CallStatus.ABORTED, FinishReason.ABORTED, "client_left")
    assert call.sampled_ids == engine.ids[:3]
    assert call.logprobs == (-0.5,) * 3


async def test_a_client_that_leaves_while_waiting_for_a_place_leaves_no_trace(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    engine = GatedEngine(renderer.encode("a<|im_end|>"))
    async with house(tmp_path, renderer, engine) as home:
        client = await home.client(limits=Limits(calls=None, concurrent=1))
        first = asyncio.create_task(client.message(ask("one")))
        await eventually(lambda: engine.running == 1)
        second = asyncio.create_task(client.message(ask("two")))
        third = asyncio.create_task(client.message(ask("three")))
        await eventually(lambda: home.proxy.sessions.get("s1").in_flight == 3)
        assert engine.running == 1
        second.cancel()
        await eventually(lambda: home.proxy.sessions.get("s1").in_flight == 2)
        engine.allow(100)
        await asyncio.gather(first, third)
        calls = await home.calls()
    assert [call.conversation.messages[0].text for call in calls] == ["one", "three"]
    assert [call.index for call in calls] == [0, 1]


async def test_a_client_that_stops_reading_is_given_up(tmp_path: Path, renderer: ChatRenderer) -> None:
    """It is still connected, but takes nothing: its generation must not run for ever, nor hold its place."""
    ids = renderer.encode("word " * 50)
    engine = GatedEngine(ids * 400, free=True)
    engine.context_length = 10**6
    async with house(tmp_path, renderer, engine, write_timeout_s=0.3) as home:
        client = await home.client(sampling=Sampling(max_tokens=10**6))
        host, port = home.proxy.data_address
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        body = json.dumps(ask(stream=True)).encode()
        path = client.url.partition(f":{port}")[2]
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.session.key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await eventually(lambda: engine.closed_early == 1, 20)
        await home.proxy.sessions.seal("s1")
        (call,) = await home.calls()
        writer.close()
        del reader
    assert (call.status, call.error) == (CallStatus.ABORTED, "client_left")
    assert len(call.sampled_ids) == engine.sampled < len(engine.ids)


async def test_a_late_disconnect_changes_nothing(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a b"})) as home:
        client = await home.client()
        async for data in client.events(ask()):
            if data != "[DONE]" and json.loads(data)["choices"][0]["finish_reason"]:
                break  # leaves before the end mark
        (call,) = await home.calls()
    assert call.status is CallStatus.COMPLETE
