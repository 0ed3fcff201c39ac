"""An inference server as vLLM and SGLang speak, over real HTTP, with a model that can be computed by hand.

The model's next id depends on the ids before it alone, so whatever breaks on the way, the answer to a prompt is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

VOCABULARY = 32
Flavour = Literal["vllm", "sglang", "sglang-incremental"]


def logits(ids: Sequence[int], weights: int = 0) -> list[float]:
    """What the model with these weights thinks comes after `ids`, one number for each id of the vocabulary."""
    seed = hashlib.blake2b(f"{weights}:{list(ids)}".encode(), digest_size=2 * VOCABULARY).digest()
    return [int.from_bytes(seed[2 * id : 2 * id + 2], "big") / 8192 for id in range(VOCABULARY)]


def logprob(ids: Sequence[int], id: int, temperature: float = 1.0, weights: int = 0) -> float:
    """log_softmax(logits / temperature)[id]."""
    scaled = [value / temperature for value in logits(ids, weights)]
    return scaled[id] - math.log(sum(math.exp(value) for value in scaled))


def likeliest(ids: Sequence[int], weights: int = 0) -> int:
    """The id that the server always samples."""
    values = logits(ids, weights)
    return values.index(max(values))


def continuation(ids: Sequence[int], count: int, weights: int = 0) -> list[int]:
    """The next `count` ids."""
    known = list(ids)
    for _ in range(count):
        known.append(likeliest(known, weights))
    return known[len(ids) :]


@dataclass(slots=True)
class FakeServer:
    """One replica, and how it misbehaves."""

    url: str = ""
    flavour: Flavour = "vllm"
    at_temperature: bool = True
    dies_after: int | None = None
    """The connection breaks after so many ids of every answer."""
    refuses: int = 0
    """HTTP status of every answer."""
    fails_at: int | None = None
    """Prompts that hold this id end in an error: of status 500, or inside the stream after `fails_after` ids."""
    fails_after: int | None = None
    health: int = 200
    """Status of `/health`."""
    aborts_after: int | None = None
    delay_s: float = 0.0
    """Between two ids."""
    context: int = 64
    pad: int | None = None
    """Id of an image's placeholder; None: it takes no images. Every image takes `patches` of them."""
    patches: int = 4
    reads: Callable[[list[int]], list[int] | None] = list
    """The prompt with images as it read it, of the prompt as it should; None: it does not say."""
    takes_weights: bool = True
    update_fails_at: str = ""
    """Path of a weight update's request that fails."""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    updates: list[str] = field(default_factory=list[str])
    left: int = 0
    """Clients that left in mid-answer."""
    weights: int = 0

    async def models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": "fake", "max_model_len": self.context}]})

    async def healthy(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=self.health)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuses:
            return web.json_response({"error": {"message": "no"}}, status=self.refuses, headers={"Retry-After": "2.5"})
        params = body.get("sampling_params", body)
        ids = next(body[name] for name in ("prompt", "token_ids", "input_ids") if name in body)
        images = body.get("content_parts") or body.get("image_data") or []
        if images:
            if ids.count(self.pad) != len(images):
                error = {"message": f"{ids.count(self.pad)} placeholders for {len(images)} images"}
                return web.json_response({"error": error}, status=400)
            ids = [id for one in ids for id in [one] * (self.patches if one == self.pad else 1)]
        if not body.get("stream"):
            return web.json_response(self._top(ids, params["temperature"]))
        self.bodies.append(body)
        if self.fails_at in ids and self.fails_after is None:
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, ids, params, bool(images))
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, ids: list[int], params: dict[str, Any], images: bool) -> None:
        most = params["max_tokens" if self.flavour == "vllm" else "max_new_tokens"]
        told = params["temperature"] if self.at_temperature and params["temperature"] else 1.0
        rows: list[tuple[int, float]] = []
        known = list(ids)
        if self.aborts_after == 0:
            await response.write(b"data: " + json.dumps(self._event([], "abort")).encode() + b"\n\ndata: [DONE]\n\n")
            return
        while True:
            await asyncio.sleep(self.delay_s)
            if self.dies_after == len(rows) and response.prepared:
                assert response._req is not None and response._req.transport is not None  # pyright: ignore[reportPrivateUsage]
                response._req.transport.abort()  # pyright: ignore[reportPrivateUsage]
                return
            if self.fails_at in ids and self.fails_after == len(rows):
                error = {"error": {"message": "an assertion failed", "code": 500}}
                await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
                return
            id = likeliest(known, self.weights)
            rows.append((id, logprob(known, id, told, self.weights)))
            known.append(id)
            finish = "stop" if id in params["stop_token_ids"] else "length" if len(rows) == most else None
            if self.aborts_after == len(rows):
                finish = "abort"
            event = self._event(rows, finish)
            if images and self.flavour == "vllm":
                event["choices"][0]["logprobs"] = {"content": [{"token_id": id, "logprob": rows[-1][1]}]}
            if images and (len(rows) == 1 or self.flavour != "vllm") and (read := self.reads(ids)) is not None:
                event["prompt_token_ids"] = read
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if finish:
                await response.write(b"data: [DONE]\n\n")
                return

    def _event(self, rows: list[tuple[int, float]], finish: str | None) -> dict[str, Any]:
        if self.flavour == "vllm":
            new = rows[-1:]
            logprobs = {"token_logprobs": [value for _, value in new], "tokens": ["?"] * len(new)}
            logprobs |= {"top_logprobs": [None] * len(new), "text_offset": [0] * len(new)}
            ids = [id for id, _ in new]
            choice = {"index": 0, "text": "?", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
            return {"id": "cmpl", "choices": [choice]}
        shown = rows[-1:] if self.flavour == "sglang-incremental" else rows
        meta = {
            "completion_tokens": len(rows),
            "output_token_logprobs": [[value, id, None] for id, value in shown],
            "finish_reason": {"type": finish} if finish else None,
            "weight_version": str(self.weights),
        }
        return {"text": None, "output_ids": [id for id, _ in shown], "meta_info": meta}

    def _top(self, ids: list[int], temperature: float) -> dict[str, Any]:
        told = temperature if self.at_temperature else 1.0
        values = sorted((logprob(ids, id, told, self.weights) for id in range(VOCABULARY)), reverse=True)[:2]
        if self.flavour == "vllm":
            logprobs = {"top_logprobs": [{"a": values[0], "b": values[1]}], "token_logprobs": values[:1]}
            return {"choices": [{"token_ids": [likeliest(ids)], "logprobs": logprobs}]}
        return {"meta_info": {"output_top_logprobs": [[[value, 0, None] for value in values]]}}

    async def update(self, request: web.Request) -> web.Response:
        self.updates.append(str(request.rel_url))
        if request.path == self.update_fails_at:
            return web.json_response({"detail": "Timed out"}, status=500)
        if not self.takes_weights:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path in ("/collective_rpc", "/update_weights_from_disk"):
            self.weights += 1
        return web.json_response({"success": True})


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncGenerator[FakeServer]:
    """`server` listening on a free port of this machine; its `url` is set."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.healthy)
    app.router.add_post("/v1/completions" if server.flavour == "vllm" else "/generate", server.generate)
    if server.flavour == "vllm" and server.pad is not None:
        app.router.add_post("/inference/v1/generate", server.generate)
    for path in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weights_from_disk"):
        app.router.add_post(path, server.update)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
