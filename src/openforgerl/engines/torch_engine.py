"""The torch engine: continuous batching in one worker thread, chunks delivered token by token to asyncio.

The worker is the only thread that touches the model. It sleeps on a condition while there is nothing to do and
hands what a step sampled to each event loop in one call, so that nobody polls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from openforgerl.engines.options import EngineOptions
from openforgerl.engines.torch_batching import Batcher, Event
from openforgerl.engines.torch_model import PackedModel
from openforgerl.engines.torch_sampling import Draws
from openforgerl.engines.torch_sequence import Sequence
from openforgerl.errors import EngineError, EngineOverloaded
from openforgerl.protocols import Renderer
from openforgerl.types import Chunk, Prompt, Sampling

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done and is doing. Tokens unless said otherwise."""

    prefill_computed: int
    prefill_reused: int
    """Prompt tokens whose keys and values were found instead of computed."""
    decoded: int
    steps: int
    """Forward passes."""
    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences in the queue."""
    cached: int
    """Tokens in the prefix tree."""


class _Stream:
    """Where one generation's chunks go."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sequence: Sequence) -> None:
        self.loop = loop
        self.sequence = sequence
        self.arrived: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._held: Chunk | EngineError | None = None

    async def next(self) -> Chunk:
        """What has arrived, as one chunk: a reader that is slower than the model gets several tokens at once."""
        first = self._held or await self.arrived.get()
        self._held = None
        if isinstance(first, EngineError):
            raise first
        while first.finish is None and not self.arrived.empty():
            second = self.arrived.get_nowait()
            joined = _joined(first, second) if isinstance(second, Chunk) else None
            if joined is None:
                self._held = second
                break
            first = joined
        return first


class TorchEngine:
    """Implements `InferenceEngine` and `WeightControl` with a Hugging Face causal language model.

    Use `await close()` when done. A model object that is given is taken over (attention replaced, weights
    overwritten by `load`): give a copy of a model that something else uses.
    """

    batcher_type: ClassVar[type[Batcher]] = Batcher

    def __init__(
        self,
        model: Path | Any,
        *,
        model_name: str | None = None,
        threads: int | None = None,
        max_sequences: int | None = None,
        options: EngineOptions | None = None,
        stop_ids: tuple[int, ...] | None = None,
        weights_version: int = 0,
    ) -> None:
        """`model`: a model directory, or a loaded transformers model (then device and dtype are its own).

        `threads` and `max_sequences` win over `options`. `stop_ids`: ids that end an answer (None = the model's
        generation config). Raises InputError or EngineError when the model cannot be loaded or run.
        """
        options = options or EngineOptions()
        self._model = (
            PackedModel.load(model, dtype=_DTYPES[options.dtype], device=options.device)
            if isinstance(model, Path)
            else PackedModel(model)
        )
        self._name = model_name or options.model_name or (model.name if isinstance(model, Path) else "policy")
        self._context = min(
            length for length in (options.context_length, self._model.positions or 1 << 30) if length is not None
        )
        self._stop_ids = frozenset(self._model.stop_ids() if stop_ids is None else stop_ids)
        self._batcher = self.batcher_type(
            self._model,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=max_sequences or options.max_sequences,
            kv_tokens=options.kv_memory_mb * (1 << 20) // self._model.bytes_per_token(),
            version=weights_version,
        )
        self._max_waiting = options.max_waiting
        self._threads = threads or options.threads
        self._streams: dict[Sequence, _Stream] = {}
        self._changed = threading.Condition()
        self._submitted: deque[Sequence] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._paused = False
        self._closing = False
        self._broken: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="torch-engine", daemon=True)
        self._worker.start()

    @classmethod
    def open(cls, path: Path, renderer: Renderer, options: EngineOptions) -> TorchEngine:
        """The model in directory `path`; an answer ends where the renderer's template ends a turn."""
        return cls(path, options=options, stop_ids=renderer.stop_ids)

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def weights_version(self) -> int:
        return self._batcher.version

    @property
    def stats(self) -> EngineStats:
        """A snapshot; numbers of one instant may be a step apart."""
        counters = self._batcher.counters
        return EngineStats(
            prefill_computed=counters.filled,
            prefill_reused=counters.reused,
            decoded=counters.decoded,
            steps=counters.steps,
            running=self._batcher.running,
            waiting=self._batcher.waiting + len(self._submitted),
            cached=self._batcher.tree.tokens,
        )

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
        """Sample an answer, one chunk a token (several when the reader is slow).

        Higher `priority` is let in first. Past `deadline` (Unix seconds) the last chunk says aborted. Closing
        the iterator frees the place at the next step. Raises EngineError when the prompt cannot be taken.
        """
        sequence = self._sequence(prompt, sampling, priority, deadline)
        stream = _Stream(asyncio.get_running_loop(), sequence)
        with self._changed:
            self._refuse_when_unable()
            self._refuse_when_full()
            self._streams[sequence] = stream
            self._submitted.append(sequence)
            self._changed.notify()
        ended = False
        try:
            while not ended:
                chunk = await stream.next()
                ended = chunk.finish is not None
                yield chunk
        finally:
            if not ended:
                self._cancel(sequence)

    async def pause(self) -> None:
        """Stop stepping after the current step; requests wait. Deadlines and cancellations still count."""
        await self._command(lambda: setattr(self, "_paused", True))

    async def load(self, weights: Path | Mapping[str, object], version: int) -> None:
        """Replace the weights between two steps; sequences in flight go on under the new ones.

        `weights`: a safetensors file or model directory, or tensors by name, which must not change meanwhile.
        Raises InputError, with nothing changed, when they do not fit the model.
        """
        await self._command(lambda: self._batcher.load(weights, version))

    async def resume(self) -> None:
        """Go on stepping."""
        await self._command(lambda: setattr(self, "_paused", False))

    async def close(self) -> None:
        """Fail what is in flight, stop the worker and wait for it. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._worker.join)

    # -- asyncio side ------------------------------------------------------------------------------------------

    def _sequence(self, prompt: Prompt, sampling: Sampling, priority: int, deadline: float | None) -> Sequence:
        ids = prompt.ids
        if prompt.images:
            raise EngineError("the torch engine takes no images", status=400)
        if not ids:
            raise EngineError("an empty prompt cannot be continued", status=400)
        if min(ids) < 0 or max(ids) >= self._model.vocabulary:
            raise EngineError(f"prompt ids must be 0 to {self._model.vocabulary - 1}", status=400)
        room = self._context - len(ids)
        if room < 1:
            raise EngineError(f"{len(ids)} prompt tokens leave no room in a context of {self._context}", status=400)
        return Sequence(
            ids,
            Draws(sampling, ids, self._model.vocabulary, self._model.device),
            most_tokens=min(sampling.max_tokens, room),
            stop_ids=self._stop_ids,
            priority=priority,
            deadline=deadline,
        )

    def _refuse_when_unable(self) -> None:
        if self._broken is not None:
            raise EngineError(f"the torch engine's worker has died: {self._broken!r}") from self._broken
        if self._closing:
            raise EngineError("the torch engine is closed", status=503)

    def _refuse_when_full(self) -> None:
        if self._batcher.waiting + len(self._submitted) >= self._max_waiting:
            raise EngineOverloaded(f"{self._max_waiting} requests are waiting already", retry_after=1.0)

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._streams.pop(sequence, None)
            self._changed.notify()

    async def _command(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._changed:
            self._refuse_when_unable()
            self._commands.append((act, done))
            self._changed.notify()
        await asyncio.wrap_future(done)

    # -- worker side -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                self._run_commands()
                self._deliver(self._batcher.drop() if self._paused else self._batcher.step())
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._end()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the engine closes."""
        batcher = self._batcher
        with self._changed:
            while not self._closing:
                while self._submitted:
                    batcher.submit(self._submitted.popleft())
                if self._commands or self._cancelled_any():
                    return True
                busy = batcher.waiting + batcher.running > 0
                if busy and not self._paused:
                    return True
                left = batcher.next_deadline() - time.time()
                if left <= 0:
                    return True
                self._changed.wait(None if left == float("inf") else left)
        return False

    def _cancelled_any(self) -> bool:
        return self._paused and self._batcher.any_cancelled()

    def _run_commands(self) -> None:
        while self._commands:
            act, done = self._commands.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                act()
            except Exception as error:  # noqa: BLE001 (whoever awaits the command gets it)
                done.set_exception(error)
            else:
                done.set_result(None)

    def _deliver(self, events: list[Event]) -> None:
        """Hand events to their loops, one call a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk | EngineError]]] = {}
        with self._changed:
            for sequence, item in events:
                stream = self._streams.get(sequence)
                if stream is None:
                    continue
                if isinstance(item, EngineError) or item.finish is not None:
                    del self._streams[sequence]
                by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, items)

    def _end(self) -> None:
        """Nobody may wait for ever: fail every stream and command that is left."""
        with self._changed:
            self._closing = True
            left, self._streams = list(self._streams.values()), {}
            commands, self._commands = list(self._commands), deque()
        reason = EngineError("the torch engine was closed", status=503)
        if self._broken is not None:
            reason = EngineError(f"the torch engine's worker has died: {self._broken!r}")
        for stream in left:
            if not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.arrived.put_nowait, reason)
        for _, done in commands:
            if done.set_running_or_notify_cancel():
                done.set_exception(reason)


def _put_all(items: list[tuple[_Stream, Chunk | EngineError]]) -> None:
    for stream, item in items:
        stream.arrived.put_nowait(item)


def _joined(first: Chunk, second: Chunk) -> Chunk | None:
    """Both as one chunk; None when other weights sampled the second."""
    if first.weights_version != second.weights_version and second.ids:
        return None
    sampling = (first.sampling_logprobs or ()) + (second.sampling_logprobs or ())
    return Chunk(
        ids=first.ids + second.ids,
        logprobs=(first.logprobs or ()) + (second.logprobs or ()),
        weights_version=first.weights_version,
        finish=second.finish,
        sampling_logprobs=sampling if first.sampling_logprobs is not None else None,
    )
