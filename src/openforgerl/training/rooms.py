"""What a trainer that is not ours gets: the tasks of a config, and groups of rollouts in its harnesses.

Such a trainer owns the loop and blocks its thread, so the rooms of the run live on an event loop of their own.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openforgerl.config import choose_tasks
from openforgerl.orchestrator import OrchestratedGroups, Recording, failure_line
from openforgerl.orchestrator.assembly import House, RunFolder, keep_tokenizer, open_house, open_run
from openforgerl.protocols import InferenceEngine, Renderer
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.training.configs import GrpoConfig
from openforgerl.types import Attempt, Rollout, Sampling, Source, Task

T = TypeVar("T")

log = logging.getLogger(__name__)


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
    tokenizer: Path,
    say: Callable[[str], None],
) -> AsyncGenerator[OpenRooms]:
    """Open the run folder at `path` and serve `engine` behind the proxy; failures of attempts are said as they come.

    `tokenizer`: the directory whose tokenizer the run folder keeps.
    """

    def on_attempt(rollout: Rollout, attempt: Attempt) -> None:
        if line := failure_line(attempt):
            say(line)

    async with open_run(path, config) as folder:
        keep_tokenizer(path, tokenizer)
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

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the rooms' loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the rooms' loop."""
        return self.begin(work).result()

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


class HarnessGroups:
    """The tasks of a config, and groups of rollouts of them, for a trainer that owns its loop."""

    def __init__(self, config: GrpoConfig, folder: Path, *, model: str = "") -> None:
        """`folder`: the run folder. `model`: the trained model's directory, where the config names no tokenizer."""
        self.config = config
        self._folder = folder
        self._tokenizer = Path(config.tokenizer or config.engine.path or model)
        self.tasks: dict[str, Task] = {task.name: task for task in choose_tasks(config)}
        self.renderer: ChatRenderer = load_renderer(
            self._tokenizer, answer_form=config.proxy.answer_form, package=config.proxy.prompt_package
        )
        self._thread: RoomsThread | None = None

    def open(self, engine: InferenceEngine) -> None:
        """Serve `engine` behind the run's proxy, until `close` or the end of this process."""

        def opening() -> AbstractAsyncContextManager[OpenRooms]:
            return open_rooms(
                self._folder,
                self.config,
                engine=engine,
                renderer=self.renderer,
                tasks=self.tasks,
                tokenizer=self._tokenizer,
                say=log.warning,
            )

        self._thread = RoomsThread(opening)
        atexit.register(self.close)

    @property
    def thread(self) -> RoomsThread:
        """Where rollouts run. AssertionError before `open`."""
        assert self._thread is not None, "HarnessGroups.open comes first"
        return self._thread

    @property
    def rooms(self) -> OpenRooms:
        """What `open` opened."""
        return self.thread.rooms

    def source(self, sampling: Sampling, *, purpose: str = "train", again: int = 0) -> OrchestratedGroups:
        """Groups of `purpose`. `again` draws other seeds for a task that is asked for twice in a step."""
        rooms = self.rooms
        return OrchestratedGroups(
            orchestrator=rooms.house.orchestrator,
            recording=Recording(Source.POLICY, sampling),
            run_id=rooms.folder.run_id,
            harness=self.config.harnesses,
            seed=self.config.seed + again,
            purpose=purpose,
        )

    def close(self) -> None:
        """Stop what is in flight and close the rooms. Idempotent."""
        if self._thread is not None:
            self._thread.close()
