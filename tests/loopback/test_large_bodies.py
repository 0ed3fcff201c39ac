"""Large bodies are read beside the loop, one of a session at a time; small ones where they came in."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from openforgerl.errors import WireError
from openforgerl.proxy.data_app import LARGE_BODY, understood
from openforgerl.proxy.sessions import LiveSession
from openforgerl.types import Session, SessionState
from openforgerl.wire import ChatDialect, Request
from openforgerl.wire.dialect import BODY_ALONE


class Watched(ChatDialect):
    """Notes in which thread it reads, and how many readings there were at once."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.at_once = 0
        self.most = 0

    def parse(self, body: bytes, **given: Any) -> Request:
        self.threads.append(threading.get_ident())
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(0.02 if len(body) >= LARGE_BODY else 0)
        self.at_once -= 1
        return super().parse(body, **given)


def session() -> LiveSession:
    record = Session(session_id="s", key_sha256="", state=SessionState.OPEN, opened_at=0.0)
    return LiveSession(record, closing=asyncio.Event())


def body(characters: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x" * characters}]}).encode()


async def read(dialect: Watched, live: LiveSession, data: bytes) -> Request:
    return await understood(dialect, data, live, strict=False, address=BODY_ALONE)


async def test_a_large_body_is_read_in_a_thread_and_a_small_one_is_not() -> None:
    dialect, live = Watched(), session()
    large = await read(dialect, live, body(LARGE_BODY))
    small = await read(dialect, live, body(10))
    assert [len(request.conversation.messages[0].text) for request in (large, small)] == [LARGE_BODY, 10]
    assert dialect.threads[0] != threading.get_ident() == dialect.threads[1]


async def test_one_session_reads_one_large_body_at_a_time_and_the_loop_goes_on() -> None:
    dialect, live, turns = Watched(), session(), 0
    readings = asyncio.gather(*(read(dialect, live, body(LARGE_BODY)) for _ in range(5)))
    while not readings.done():
        turns += 1
        await asyncio.sleep(0)
    assert (len(await readings), dialect.most) == (5, 1)
    assert turns > 5


async def test_sessions_do_not_wait_for_each_other() -> None:
    dialect = Watched()
    await asyncio.gather(*(read(dialect, session(), body(LARGE_BODY)) for _ in range(4)))
    assert dialect.most > 1


async def test_a_refusal_comes_out_of_the_thread() -> None:
    with pytest.raises(WireError, match="not valid JSON"):
        await read(Watched(), session(), b"[" + b" " * LARGE_BODY)
