"""Rooms on a thread of their own: work runs there, failures are heard, and closing leaves nothing behind."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from openforgerl.training.rooms import OpenRooms, RoomsThread


def opening_with(notes: list[str], error: Exception | None = None) -> Any:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[OpenRooms]:
        if error is not None:
            raise error
        notes.append(f"open in {threading.current_thread().name}")
        yield cast(OpenRooms, "rooms")
        await asyncio.sleep(0)
        notes.append("closed")

    def opened() -> AbstractAsyncContextManager[OpenRooms]:
        return opening()

    return opened


def test_work_is_cancelled_before_the_rooms_close() -> None:
    notes: list[str] = []
    failures: list[BaseException] = []
    thread = RoomsThread(opening_with(notes))
    begun: queue.Queue[int] = queue.Queue()

    async def endless() -> None:
        begun.put(1)
        try:
            await asyncio.sleep(60)
        finally:
            notes.append("cancelled")

    thread.submit(endless(), failures.append)
    begun.get(timeout=10)
    assert cast(str, thread.rooms) == "rooms"
    thread.close()
    thread.close()
    assert notes == ["open in openforgerl-rooms", "cancelled", "closed"]
    assert failures == []


def test_a_failure_is_heard_and_the_rooms_stay_open() -> None:
    notes: list[str] = []
    heard: queue.Queue[BaseException] = queue.Queue()
    thread = RoomsThread(opening_with(notes))

    async def broken() -> None:
        raise RuntimeError("the queue is gone")

    async def answer() -> int:
        return 7

    thread.submit(broken(), heard.put)
    assert str(heard.get(timeout=10)) == "the queue is gone"
    assert thread.wait(answer()) == 7
    thread.close()
    assert notes[-1] == "closed"


def test_rooms_that_do_not_open_say_why() -> None:
    with pytest.raises(OSError, match="port taken"):
        RoomsThread(opening_with([], OSError("port taken")))
