"""Bodies of any kind through a real proxy: an answer that is recorded or a 4xx, never a 500 or a lost call."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus

from ..wire import fuzz_chat, fuzz_gemini, fuzz_messages, fuzz_responses  # noqa: TID252  (the same bodies)
from ..wire.fuzzing import BATCH, Target, batches  # noqa: TID252
from .house import Client, House, house, scripted

TARGETS = {
    "/v1/chat/completions": fuzz_chat.TARGET,
    "/v1/responses": fuzz_responses.TARGET,
    "/v1/messages": fuzz_messages.TARGET,
    "/v1beta/models/m:generateContent": fuzz_gemini.TARGET,
}
DRAWS = 12


def bodies_of(target: Target) -> list[bytes]:
    """Always the same ones."""
    found: list[bytes] = []

    @seed(1)
    @settings(max_examples=DRAWS, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(batches(target.whole))
    def draw(bodies: list[bytes]) -> None:
        found.extend(bodies)

    draw()
    return found


async def post(at: House, client: Client, path: str, body: bytes) -> tuple[int, bytes]:
    url = client.session.base_urls["messages"].rstrip("/") + path
    async with asyncio.timeout(30), at.http.post(url, data=body, headers=client.headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", TARGETS)
async def test_any_body_is_answered_and_recorded_or_refused(path: str, tmp_path: Path, renderer: ChatRenderer) -> None:
    bodies = bodies_of(TARGETS[path])
    assert len(bodies) >= DRAWS * BATCH / 2
    engine = scripted(renderer, {"text": "ok", "times": 0}, context_length=10**6)
    async with house(tmp_path, renderer, engine) as at:
        client = await at.client()
        gate = asyncio.Semaphore(8)

        async def one(body: bytes) -> tuple[int, bytes]:
            async with gate:
                return await post(at, client, path, body)

        replies = await asyncio.gather(*map(one, bodies))
        statuses = Counter(status for status, _ in replies)
        assert all(status == 200 or 400 <= status < 500 for status in statuses), statuses
        assert statuses[200] > 10 and statuses[400] > 10
        for status, said in replies:
            if status != 200:
                assert json.loads(said)["error"]["message"]
        calls = await at.calls()
        complete = [call for call in calls if call.status is CallStatus.COMPLETE]
        assert len(complete) == statuses[200]
        assert {call.status for call in calls} <= {CallStatus.COMPLETE, CallStatus.ERROR}
        assert all(call.answer is not None and call.answer.text.endswith("ok") for call in complete)
