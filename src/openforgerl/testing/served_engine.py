"""An engine of ours behind SGLang's `/generate`: whatever speaks to SGLang can be tried without a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from openforgerl.protocols import InferenceEngine
from openforgerl.types import Prompt, Sampling


class _Server:
    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    async def models(self, request: web.Request) -> web.Response:
        del request
        card = {"id": self._engine.model_name, "max_model_len": self._engine.context_length}
        return web.json_response({"object": "list", "data": [card]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params: dict[str, Any] = body["sampling_params"]
        sampling = Sampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(0, params["top_k"]),
            seed=params.get("sampling_seed"),
            max_tokens=params["max_new_tokens"],
        )
        if not body.get("stream"):
            # The probe: at temperature T the gap between two ids is the gap at 1 over T, whatever the ids are.
            tops = [[0.0, 0, None], [-math.log(2) / params["temperature"], 1, None]]
            return web.json_response({"meta_info": {"output_top_logprobs": [tops]}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        rows: list[list[Any]] = []
        prompt = Prompt(ids=tuple(body["input_ids"]))
        async for chunk in self._engine.generate(prompt, sampling, affinity=body["session_id"]):
            values = chunk.logprobs or (None,) * len(chunk.ids)
            rows += [[value, id, None] for value, id in zip(values, chunk.ids, strict=True)]
            finish = None if chunk.finish is None else {"type": chunk.finish.value}
            meta = {"completion_tokens": len(rows), "output_token_logprobs": rows, "finish_reason": finish}
            event = {"output_ids": [row[1] for row in rows], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def as_sglang(engine: InferenceEngine) -> AsyncGenerator[str]:
    """`engine` on a free port of this machine; yields the URL."""
    server = _Server(engine)
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/generate", server.generate)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
