"""Ctrl-C and SIGTERM stop long work cleanly: what is in flight is cancelled, what is finished is stored."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from openforgerl.errors import Interrupted

T = TypeVar("T")


def run_until_interrupted(work: Coroutine[Any, Any, T], resume: str) -> T:
    """Run `work` to its end. On SIGINT or SIGTERM cancel it, let it clean up, and raise `Interrupted(resume)`."""
    return asyncio.run(_run(work, resume))


@contextmanager
def terminate_like_interrupt() -> Generator[None]:
    """SIGTERM raises KeyboardInterrupt in this block, as Ctrl-C does: for long work outside an event loop."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _run(work: Coroutine[Any, Any, T], resume: str) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    asked = asyncio.Event()

    def stop() -> None:
        asked.set()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if asked.is_set():
            raise Interrupted(resume) from None
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
