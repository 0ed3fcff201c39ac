"""A fake of somebody else's API: real HTTP, answers from a list of plays, every request kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Play = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY = "sk-real-key-of-ours-0123456789"


class Upstream:
    """Plays `plays` one after another; the last one again and again."""

    def __init__(self, *plays: Play) -> None:
        self.plays = list(plays)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at: list[float] = []
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path)
        self.at.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            play = self.plays[min(len(self.bodies), len(self.plays)) - 1]
            return await play(request)
        finally:
            self.running -= 1


@asynccontextmanager
async def upstream(*plays: Play) -> AsyncGenerator[Upstream]:
    fake = Upstream(*plays)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", fake.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}/v1"
        yield fake
    finally:
        await runner.cleanup()


def stream(*pieces: bytes, delay: float = 0.0, cut: bool = False, content_type: str = "text/event-stream") -> Play:
    """Send the pieces; `cut`: drop the connection after them, without an end."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for piece in pieces:
            await asyncio.sleep(delay)
            await response.write(piece)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return play


def refuse(status: int, body: Any = None, **headers: str) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({} if body is None else body, status=status, headers=named)

    return play


def drop() -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return play


def silent(seconds: float) -> Play:
    async def play(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.Response()

    return play


def data(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return data({"id": "x", "object": "chat.completion.chunk", "choices": choices, **fields})


def openai(*deltas: dict[str, Any], finish: str = "stop", usage: dict[str, Any] | None = None, **how: Any) -> Play:
    """A whole OpenAI stream."""
    pieces = [chunk({"role": "assistant", "content": ""}), *(chunk(delta) for delta in deltas), chunk({}, finish)]
    if usage is not None:
        pieces.append(chunk(usage=usage))
    return stream(*pieces, data(b"[DONE]"), **how)


def says(text: str, **how: Any) -> Play:
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 60}}
    return openai(*({"content": piece} for piece in text), usage=usage, **how)


def calls(*named: tuple[str, str]) -> Play:
    """Tool calls by name and arguments, each in three pieces, under ids that repeat from answer to answer."""
    deltas: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(named):
        head = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        half = len(arguments) // 2
        deltas.append({"tool_calls": [head]})
        for part in (arguments[:half], arguments[half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    return openai(*deltas, finish="tool_calls", usage={"prompt_tokens": 50, "completion_tokens": 20})


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + data({"type": kind, **fields})


def anthropic(*blocks: tuple[dict[str, Any], list[dict[str, Any]]], stop: str = "end_turn", **how: Any) -> Play:
    """A whole Anthropic stream: blocks as (start, deltas)."""
    usage = {"input_tokens": 10, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 5, "output_tokens": 1}
    pieces = [event("message_start", message={"id": "m", "usage": usage}), event("ping")]
    for at, (start, deltas) in enumerate(blocks):
        pieces.append(event("content_block_start", index=at, content_block=start))
        pieces += [event("content_block_delta", index=at, delta=delta) for delta in deltas]
        pieces.append(event("content_block_stop", index=at))
    pieces.append(event("message_delta", delta={"stop_reason": stop}, usage={"output_tokens": 12}))
    return stream(*pieces, event("message_stop"), **how)
