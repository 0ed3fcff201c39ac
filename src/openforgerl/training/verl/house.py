"""The rooms of a run on an event loop of their own, beside veRL's trainer, which blocks its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openforgerl.orchestrator import failure_line
from openforgerl.orchestrator.assembly import House, RunFolder, keep_tokenizer, open_house, open_run
from openforgerl.protocols import InferenceEngine, Renderer
from openforgerl.training.configs import GrpoConfig
from openforgerl.types import Attempt, Rollout, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenRooms:
    """What a collection of groups needs."""

    folder: RunFolder
    house: House


@asynccontextmanager
async def open_rooms(
    path: Path,
    config: GrpoConfig,
    *,
    engine: InferenceEngine,
    renderer: Renderer,
    tasks: Mapping[str, Task],
    say: Callable[[str], None],
) -> AsyncGenerator[OpenRooms]:
    """Open the run folder at `path` and serve `engine` behind the proxy; failures of attempts are said as they come."""

    def on_attempt(rollout: Rollout, attempt: Attempt) -> None:
        if line := failure_line(attempt):
            say(line)

    async with open_run(path, config) as folder:
        keep_tokenizer(path, Path(config.tokenizer or config.engine.path))
        async with open_house(
            folder, config, config.run, engine=engine, renderer=renderer, tasks=tasks, on_attempt=on_attempt
        ) as house:
            yield OpenRooms(folder, house)


class RoomsThread:
    """Opens rooms on an event loop in a thread of its own, and runs coroutines there until closed."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[OpenRooms]]) -> None:
        """Returns when `opening()` has been entered; raises what entering it raised."""
        self._opened: Future[OpenRooms] = Future()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._work: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, args=(opening,), name="openforgerl-rooms", daemon=True)
        self._thread.start()
        self.rooms = self._opened.result()

    def submit(self, work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> None:
        """Begin `work` beside what is running; `failed` gets what it raises, on the rooms' thread."""

        def ended(done: Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                failed(error)

        asyncio.run_coroutine_threadsafe(self._kept(work), self._loop).add_done_callback(ended)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the rooms' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Cancel what is in flight, close the rooms and wait for it. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    async def _kept(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        try:
            await task
        finally:
            self._work.discard(task)

    def _run(self, opening: Callable[[], AbstractAsyncContextManager[OpenRooms]]) -> None:
        try:
            self._loop.run_until_complete(self._stay_open(opening))
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)  # whoever opens the rooms gets it
        finally:
            self._loop.close()

    async def _stay_open(self, opening: Callable[[], AbstractAsyncContextManager[OpenRooms]]) -> None:
        async with opening() as rooms:
            self._opened.set_result(rooms)
            await self._closing.wait()
            left = list(self._work)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
