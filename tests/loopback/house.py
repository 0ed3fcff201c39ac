"""A real proxy over real HTTP with a real store; only the engine is scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.protocols import InferenceEngine
from openforgerl.proxy import HttpSessions, InProcessSessions, ProxyOptions, ProxyServer, control_token
from openforgerl.rendering import ChatRenderer
from openforgerl.store import CallStore, Database
from openforgerl.types import Chunk, Conversation, FinishReason, Limits, ModelCall, OpenedSession, Prompt, Sampling
from openforgerl.wire import SseReader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
NO_LIMITS = Limits(calls=None)


def script(*answers: dict[str, Any]) -> Script:
    return Script.decode(json.dumps({"answers": answers}))


def ask(text: str = "Hi.", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Reply:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Streamed:
    """What a client got from a stream."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    error: dict[str, Any] | None = None
    comments: int = 0
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(delta.get("content") or "" for delta in self.deltas)

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [chunk["choices"][0]["delta"] for chunk in self.chunks if chunk["choices"]]

    @property
    def finish(self) -> str | None:
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in self.chunks if chunk["choices"]]
        return reasons[-1] if reasons else None


class Client:
    """An agent's HTTP client, with one session's credentials."""

    def __init__(self, http: aiohttp.ClientSession, session: OpenedSession) -> None:
        self.http = http
        self.session = session
        self.url = f"{session.base_urls['chat']}/chat/completions"
        self.headers = {"Authorization": f"Bearer {session.key}", "User-Agent": "test/1"}

    async def post(self, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url, data=data, headers={**self.headers, **headers}) as response:
            return Reply(response.status, dict(response.headers), await response.json())

    async def message(self, body: Any) -> dict[str, Any]:
        reply = await self.post(body)
        assert reply.status == 200, reply.body
        return reply.body["choices"][0]["message"]

    async def events(self, body: Any) -> AsyncIterator[str]:
        """Data of events as they arrive."""
        reader = SseReader()
        async with self.http.post(self.url, json={**body, "stream": True}, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for piece in response.content.iter_any():
                for event in reader.feed(piece):
                    yield event.data

    async def stream(self, body: Any) -> Streamed:
        got = Streamed()
        try:
            async for data in self.events(body):
                if data == "[DONE]":
                    got.done = True
                elif "error" in (value := json.loads(data)):
                    got.error = value["error"]
                else:
                    got.chunks.append(value)
        except aiohttp.ClientPayloadError:
            got.cut = True
        return got


class GatedEngine:
    """Samples one id only after `allow()`; says how far it came and whether it was closed early."""

    model_name = "gated"
    context_length = 4096
    weights_version = 3

    def __init__(self, ids: Sequence[int], *, free: bool = False) -> None:
        self.ids = tuple(ids)
        self.sampled = 0
        self.closed_early = 0
        self.running = 0
        self.started = asyncio.Event()
        self._permits = asyncio.Semaphore(len(ids) * 1000 if free else 0)

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()

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
        whole = False
        self.running += 1
        self.started.set()
        try:
            for at, token in enumerate(self.ids):
                await self._permits.acquire()
                self.sampled += 1
                last = at + 1 == len(self.ids)
                whole = last
                yield Chunk(
                    ids=(token,),
                    logprobs=(-0.5,),
                    weights_version=self.weights_version,
                    finish=FinishReason.STOP if last else None,
                )
        finally:
            self.running -= 1
            if not whole:
                self.closed_early += 1

    async def close(self) -> None: ...


@dataclass
class House:
    proxy: ProxyServer
    store: CallStore
    http: aiohttp.ClientSession
    token: str
    options: ProxyOptions

    @property
    def sessions(self) -> InProcessSessions:
        return InProcessSessions(self.proxy)

    @property
    def control_url(self) -> str:
        host, port = self.proxy.control_address
        return f"http://{host}:{port}"

    def http_sessions(self) -> HttpSessions:
        return HttpSessions(self.control_url, self.token)

    async def client(
        self,
        session_id: str = "s1",
        *,
        sampling: Sampling | None = None,
        limits: Limits = NO_LIMITS,
        metadata: dict[str, str] | None = None,
    ) -> Client:
        session = await self.sessions.open(
            session_id,
            sampling=sampling or Sampling(max_tokens=400),
            limits=limits,
            metadata=metadata or {},
            template_kwargs={},
        )
        return Client(self.http, session)

    async def calls(self, session_id: str = "s1") -> list[ModelCall]:
        return list(await self.sessions.calls(session_id))

    async def control(self, method: str, path: str, body: Any = None, token: str | None = None) -> Reply:
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        async with self.http.request(method, self.control_url + path, json=body, headers=headers) as response:
            return Reply(response.status, dict(response.headers), await response.json())


def scripted(renderer: ChatRenderer, *answers: dict[str, Any], **fields: Any) -> ScriptedEngine:
    return ScriptedEngine(script(*answers), renderer, **fields)


@asynccontextmanager
async def house(
    folder: Path, renderer: Any, engine: InferenceEngine, *, store: type[CallStore] = CallStore, **options: Any
) -> AsyncGenerator[House]:
    """The proxy around `engine`, on free ports, with its store in `folder`. Cuts come soon: clients wait for them."""
    folder.mkdir(exist_ok=True)
    chosen = ProxyOptions(control_token_file=str(folder / "control.token"), **{"parting_s": 0.05, **options})
    async with Database.open(folder / "run.sqlite") as database:
        calls = store(database)
        async with (
            ProxyServer(engine=engine, renderer=renderer, store=calls, options=chosen) as proxy,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            yield House(proxy, calls, http, control_token(folder / "control.token"), chosen)


async def eventually(condition: Any, seconds: float = 5.0) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (the conditions are other objects' counters)
            await asyncio.sleep(0.005)


class StuckRenderer:
    """A renderer that does not come to an end with a long conversation until it is let go."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.rendering = threading.Event()
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, conversation: Conversation, **fields: Any) -> Prompt:
        if len(conversation.messages[0].text) > 20_000:
            self.rendering.set()
            assert self.let_go.wait(20)
        return self._renderer.render(conversation, **fields)
