"""An engine that gives a recorded session's answers again, id by id, and may hand over to a live one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Protocol, cast

from openforgerl.errors import EngineError
from openforgerl.protocols import InferenceEngine
from openforgerl.trajectory.replaying import Record
from openforgerl.types import CallStatus, Chunk, FinishReason, ModelCall, Prompt, Sampling, WeightsSpan

PIECE = 16
"""Most ids of a chunk."""
_CUT = (CallStatus.ABORTED, CallStatus.ERROR, CallStatus.INTENT)


class _Closing(Protocol):
    async def aclose(self) -> None: ...


class RecordedEngine:
    """Answers a call with what the call in its place sampled (`trajectory.replaying.Record`).

    A prompt does not say whose it is, so `asked` must hear of every call before `generate` gets its prompt: the
    proxy's call log does (`CallLog.begin`). What was cut in the record (an engine error, a client that left) is
    given up to the cut and then fails, so that the harness does again what it did then.
    """

    def __init__(
        self,
        record: Record,
        *,
        model_name: str,
        context_length: int,
        live: InferenceEngine | None = None,
        fork: int = 0,
    ) -> None:
        """`live` answers in place of recorded calls whose index is `fork` or more, and what no record holds."""
        self._record = record
        self._model_name = model_name
        self._context_length = context_length
        self._live = live
        self._fork = fork
        self._asked: list[tuple[Prompt, ModelCall, ModelCall | None]] = []
        """Prompts that wait for an answer, their calls, and the recorded calls in whose place these stand."""

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def weights_version(self) -> int:
        return 0 if self._live is None else self._live.weights_version

    def asked(self, call: ModelCall) -> None:
        """`call` is about to be answered."""
        self._asked.append((call.prompt, call, self._record.next(call)))

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
        """The answer of the call in this one's place. EngineError 400 when there is none, 500 where it was cut."""
        call, recorded = self._take(prompt)
        if self._live is not None and (recorded is None or recorded.index >= self._fork):
            answer = self._live.generate(
                prompt, sampling, affinity=affinity, priority=priority, deadline=deadline, images=images
            )
            async with aclosing(cast(_Closing, answer)):
                async for chunk in answer:
                    yield chunk
            return
        if recorded is None:
            raise EngineError(f"the record has no further call of thread {call.thread!r}", status=400)
        for chunk in _pieces(recorded):
            yield chunk
        if recorded.status in _CUT:
            raise EngineError(f"call {recorded.call_id} was cut here: {recorded.error or recorded.status}")

    async def close(self) -> None:
        """Close the live engine, if there is one."""
        if self._live is not None:
            await self._live.close()

    def _take(self, prompt: Prompt) -> tuple[ModelCall, ModelCall | None]:
        for at, (asked, call, recorded) in enumerate(self._asked):
            if asked is prompt:
                del self._asked[at]
                return call, recorded
        raise EngineError("a prompt that no logged call has: RecordedEngine.asked must hear of every call")


def _pieces(call: ModelCall) -> list[Chunk]:
    """The recorded answer as chunks, each of one weights version; the last one says how it ended, if it did."""
    ids, logprobs = call.sampled_ids, call.logprobs
    spans = call.weights_spans or (WeightsSpan(start=0, stop=len(ids), version=call.weights_version),)
    chunks = [
        Chunk(
            ids=ids[start : min(start + PIECE, span.stop)],
            logprobs=None if logprobs is None else logprobs[start : min(start + PIECE, span.stop)],
            weights_version=span.version,
        )
        for span in spans
        for start in range(span.start, span.stop, PIECE)
    ]
    if call.status in _CUT:
        return chunks
    finish = FinishReason.STOP if call.finish_reason is FinishReason.STOP else FinishReason.LENGTH
    end = Chunk(ids=(), logprobs=None, weights_version=call.weights_version, finish=finish)
    return [*chunks, end]
