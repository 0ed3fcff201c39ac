"""kill -9 of the proxy mid-stream, then another on the same folder: nothing finished is lost, nothing lingers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openforgerl.proxy import HttpSessions, control_token
from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus, FinishReason, Limits, OpenedSession, Sampling

from .house import TOOLS, Client, ask
from .speakers import Messages, Talker

PROGRAM = Path(__file__).parent / "proxy_process.py"
SCRIPT = {
    "answers": [
        {"match": "^one", "text": "first answer", "times": 0},
        {"match": "^two", "text": "a slow answer " * 50, "delay_s": 0.02, "times": 0},
        {"match": "^three", "reasoning": "A plan.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
        {"text": "goes on", "times": 0},
    ]
}


class Process:
    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, Any]) -> None:
        self.process = process
        self.data = "http://{}:{}".format(*addresses["data"])
        self.control = "http://{}:{}".format(*addresses["control"])

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    def client(self, http: aiohttp.ClientSession, session: OpenedSession) -> Client:
        urls = {"chat": f"{self.data}/s/{session.session_id}/v1", "messages": f"{self.data}/s/{session.session_id}"}
        return Client(http, OpenedSession(session_id=session.session_id, key=session.key, base_urls=urls))


@asynccontextmanager
async def proxy_process(folder: Path, model: Path) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        str(folder),
        str(model),
        json.dumps(SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield Process(process, json.loads(line))
    finally:
        process.stdin.close()
        if process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        # Close the pipe's transport while the loop still runs.
        await process.stdout.read()


async def open_session(process: Process, folder: Path) -> OpenedSession:
    async with HttpSessions(process.control, control_token(folder / "control.token")) as sessions:
        return await sessions.open(
            "s1", sampling=Sampling(), limits=Limits(calls=10), metadata={}, template_kwargs={"a": 1}
        )


@pytest.mark.parametrize("pieces", [5])
async def test_kill_9_mid_stream(tmp_path: Path, model_dir: Path, renderer: ChatRenderer, pieces: int) -> None:
    async with aiohttp.ClientSession() as http:
        async with proxy_process(tmp_path, model_dir) as first:
            session = await open_session(first, tmp_path)
            client = first.client(http, session)
            answer = await client.message(ask("one", tools=TOOLS))
            stream = client.events(ask("two"))
            for _ in range(pieces):
                await anext(stream)
            await first.kill()
            with pytest.raises(aiohttp.ClientError):
                async for _ in stream:
                    pass
        async with proxy_process(tmp_path, model_dir) as second:
            token = control_token(tmp_path / "control.token")
            async with HttpSessions(second.control, token) as sessions:
                done, cut = await sessions.calls("s1")
                # The finished call is whole, the other is an error with a reason, not an intent for ever.
                assert done.status is CallStatus.COMPLETE
                assert done.response["choices"][0]["message"] == answer
                assert (cut.status, cut.finish_reason) == (CallStatus.ERROR, FinishReason.ERROR)
                assert (cut.error or "").startswith("interrupted")
                assert cut.timing.finished is not None
                # The key still opens the session, and the history is still known.
                client = second.client(http, session)
                history = [{"role": "user", "content": "one"}, answer, {"role": "user", "content": "more"}]
                assert (await client.message({"messages": history, "tools": TOOLS}))["content"] == "goes on"
                *_, third = await sessions.calls("s1")
                assert (third.index, third.parent_call_id) == (2, done.call_id)
                shared = (*done.prompt.ids, *done.sampled_ids)
                assert third.prompt.ids[: len(shared)] == shared
                await sessions.seal("s1")
        async with proxy_process(tmp_path, model_dir) as third_process:
            client = third_process.client(http, session)
            assert (await client.post(ask())).body["error"]["code"] == "session_closed"
            async with HttpSessions(third_process.control, control_token(tmp_path / "control.token")) as sessions:
                assert len(await sessions.calls("s1")) == 3


async def test_limits_outlive_the_process(tmp_path: Path, model_dir: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with proxy_process(tmp_path, model_dir) as first:
            session = await open_session(first, tmp_path)
            client = first.client(http, session)
            for _ in range(6):
                assert (await client.post(ask("one"))).status == 200
            await first.kill()
        async with proxy_process(tmp_path, model_dir) as second:
            client = second.client(http, session)
            statuses = [(await client.post(ask("one"))).status for _ in range(5)]
    assert statuses == [200] * 4 + [403]


async def test_a_thought_outlives_the_process(tmp_path: Path, model_dir: Path, renderer: ChatRenderer) -> None:
    """The client was shown only its handle; the proxy that gave it out is dead when it comes back."""
    speaker = Messages()
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    async with aiohttp.ClientSession() as http:
        async with proxy_process(tmp_path, model_dir) as first:
            session = await open_session(first, tmp_path)
            talker = Talker(http, first.client(http, session).session, speaker)
            history = speaker.user("three")
            said = await talker.say(history, tools=True, stream=True, **hidden)
            await first.kill()
        history += said.turn + speaker.result(said.calls[0], "a.txt")
        assert "A plan." not in json.dumps(history)
        async with proxy_process(tmp_path, model_dir) as second:
            talker = Talker(http, second.client(http, session).session, speaker)
            assert (await talker.say(history, tools=True, **hidden)).text == "goes on"
            async with HttpSessions(second.control, control_token(tmp_path / "control.token")) as sessions:
                one, two = await sessions.calls("s1")
    assert "A plan." in renderer.decode(one.sampled_ids)
    assert two.prompt.ids[: len(one.prompt.ids) + len(one.sampled_ids)] == one.prompt.ids + one.sampled_ids
    assert two.warnings == ()
