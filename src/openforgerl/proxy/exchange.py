"""ONE model call, from a parsed request to the last byte of its answer.

Read `Exchange.run`: find the thread, render, commit the intent, sample and stream, commit the call, send the
rest. Whatever happens in between, the call is recorded; nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import msgspec

from openforgerl.errors import (
    ContextOverflow,
    EngineError,
    StoreError,
    WireError,
)
from openforgerl.protocols import AnswerParser, ConversationEngine, Engine, Renderer
from openforgerl.proxy.failures import ClientLeft, Stopped, classified
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.placing import Notices, place
from openforgerl.proxy.prompting import checked_length, images_of, render_prompt
from openforgerl.proxy.sampled import SampledTokens
from openforgerl.proxy.sessions import CallLog, Ended, LiveSession, SessionRegistry
from openforgerl.proxy.spoken import RELAYED, SpokenAnswer, render_or_note
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Chunk,
    FinishReason,
    Message,
    MessageDelta,
    ModelCall,
    Question,
    Reasoning,
    Sampling,
)
from openforgerl.wire import Answer, Dialect, Head, MessageBuilder, Request, StopStrings, TokenWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an exchange depends on."""

    engine: Engine
    renderer: Renderer
    store: CallLog
    sessions: SessionRegistry
    options: ProxyOptions
    dialects: Mapping[str, Dialect]
    """The served ones, by name."""
    notices: Notices = msgspec.field(default_factory=Notices)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came in."""

    call_id: str
    request: Request
    headers: Mapping[str, str]
    """Without credentials, names in lower case; the target under `:path`."""
    received: float
    """Unix seconds."""


class Outlet(Protocol):
    """Where an answer goes. Every method raises ClientLeft when nobody is there any more."""

    async def write(self, piece: bytes) -> None:
        """Part of a stream; the first one starts it."""
        ...

    async def whole(self, body: bytes) -> None:
        """A whole JSON answer."""
        ...

    async def fail(self, error: WireError, event: bytes, *, patient: bool) -> None:
        """An error answer; or, in a stream that has started, `event`, and the stream is cut: when `patient`, not
        before the client had time to read it."""
        ...


class Exchange:
    """One call in flight."""

    def __init__(
        self, gateway: Gateway, session: LiveSession, dialect: Dialect, arrival: Arrival, outlet: Outlet
    ) -> None:
        self._gateway = gateway
        self._session = session
        self._dialect = dialect
        self._arrival = arrival
        self._outlet = outlet
        self.call_id = arrival.call_id
        self.recorded = asyncio.Event()
        """Set when nothing of this call is left to be written to the store."""
        self.stopped_by: Ended | None = None
        request = arrival.request
        self._head = Head(
            call_id=self.call_id,
            model=request.model or gateway.engine.model_name,
            created=int(arrival.received),
            handle=secrets.token_urlsafe(24),
        )
        self._writer = dialect.writer(self._head, request)
        self._current: asyncio.Task[Any] | None = None
        self._call: ModelCall | None = None
        """The intent that is committed and waits for its end."""
        self._stops = StopStrings(request.stop)
        self._built = MessageBuilder()
        self._unsent: list[MessageDelta] = []
        self._sampled = SampledTokens()
        self._spoken = SpokenAnswer.of(gateway.engine, gateway.renderer, session.record)
        self._prompt_tokens = 0
        self._images: Mapping[str, bytes] = {}
        self._sending = asyncio.Lock()
        self._opened = False
        self._last_sent = time.monotonic()

    def abort(self, why: Ended) -> None:
        """Stop as soon as possible; what was sampled is recorded. The first reason stands."""
        if self.stopped_by is None:
            self.stopped_by = why
            if self._current is not None:
                self._current.cancel()

    async def run(self) -> None:
        """Answer the call. Every failure goes to the client and into the record; none is raised."""
        async with self._session.enrolled(self):
            beats = asyncio.create_task(self._keep_alive())
            try:
                last = await self._until_recorded()
            finally:
                self.recorded.set()
                async with self._sending:  # never cut a piece that is being written
                    beats.cancel()
        try:
            if isinstance(last, WireError):
                await self._outlet.fail(last, self._writer.fail(last), patient=self.stopped_by is None)
            elif last is not None and self._arrival.request.stream:
                await self._send(last)
            elif last is not None:
                await self._outlet.whole(last)
        except ClientLeft:
            logger.info("call %s: the client left before the last byte", self.call_id)

    async def _until_recorded(self) -> bytes | WireError | None:
        """The call up to its commit; what is then still to be sent (None: nobody is there)."""
        session = self._session
        try:
            await self._until_stopped(session.take_place())
            try:
                call, prompt_left = await self._until_stopped(self._prepare())
                try:
                    if self._arrival.request.images:
                        await self._gateway.store.put_images(self._arrival.request.images)
                    await self._gateway.store.begin(call)
                except BaseException:
                    session.forget(call.call_id)
                    raise
                self._call = call
                if prompt_left < 1:
                    raise ContextOverflow(len(call.prompt.ids), self._gateway.engine.context_length)
                return await self._complete(call, await self._until_stopped(self._generate(call)))
            finally:
                session.leave_place()
        except Exception as error:  # noqa: BLE001  (even a bug of ours is recorded and told, never dropped)
            return await self._failed(error)

    async def _prepare(self) -> tuple[ModelCall, int]:
        """The call as an intent, and how many tokens the context has left for its answer (may be 0 or less).

        One call of a session at a time, in order of arrival, up to and with its being remembered: calls that arrive
        meanwhile are told apart by what is known.
        """
        async with self._session.prompting:
            call, left = await self._rendered()
            call = self._gateway.notices.noticed(self._session, call)
            self._session.remember(call)
            return call, left

    async def _rendered(self) -> tuple[ModelCall, int]:
        session, engine = self._session, self._gateway.engine
        session.check_open()
        session.check_tokens()
        request, record = self._arrival.request, session.record
        length = checked_length(request.conversation, engine)
        self._images = await images_of(request, self._gateway.store)
        index = session.take_index()
        placed = place(session, request, self._arrival.headers, self._gateway.options)
        found = placed.found
        conversation = placed.conversation
        rendering = render_prompt(
            self._gateway.renderer,
            record,
            conversation,
            length=length,
            restored=session.restorable(found.restored),
            images=self._images,
            forced=request.forced if self._spoken is None else None,
        )
        prompt = await (rendering if self._spoken is None else render_or_note(rendering, self._spoken))
        self._prompt_tokens = len(prompt.ids)
        left = engine.context_length - self._prompt_tokens
        applied = _applied(record.sampling, request, left, session.tokens_left, index)
        unlisted = tuple(f"unlisted field {name}" for name in request.unlisted)
        call = ModelCall(
            call_id=self.call_id,
            session_id=record.session_id,
            index=index,
            dialect=request.dialect,
            thread=found.thread,
            role=found.role,
            role_evidence=found.evidence,
            parent_call_id=found.parent_call_id,
            status=CallStatus.INTENT,
            conversation=conversation,
            prompt=prompt,
            weights_version=engine.weights_version,
            sampling_asked=request.asked,
            sampling_applied=applied,
            off_policy=RELAYED if self._spoken else applied.off_policy if request.forced is None else "forced",
            warnings=(*request.warnings, *unlisted, *placed.warnings),
            timing=CallTiming(received=self._arrival.received),
            request=request.raw,
            request_headers=dict(self._arrival.headers),
        )
        return call, left

    async def _generate(self, call: ModelCall) -> FinishReason:
        """Sample and deliver piece by piece. Sampling goes on only when a piece is out of our hands."""
        engine = self._gateway.engine
        if isinstance(engine, ConversationEngine):
            return await self._converse(call, engine)
        parser = self._gateway.renderer.parser(
            call.conversation, call.prompt, seed=call.call_id, forced=self._arrival.request.forced
        )
        stream = engine.generate(
            call.prompt,
            call.sampling_applied,
            affinity=call.session_id,
            deadline=self._session.deadline,
            images=self._images,
        )
        async with aclosing(cast(_Closing, stream)):
            async for chunk in stream:
                self._take(chunk)
                finish = self._finish_at(chunk.finish, parser.feed(chunk.ids))
                if finish is not None:
                    return self._finished(finish, parser)
                await self._send_unsent()
        raise EngineError("the engine ended an answer without a finish reason")

    def _take(self, chunk: Chunk) -> None:
        before = len(self._sampled.ids)
        self._sampled.add(chunk)
        self._session.sampled += len(chunk.ids)
        if self._arrival.request.logprobs and isinstance(self._writer, TokenWriter):
            self._writer.show(self._sampled.shown(self._gateway.renderer, before) or ())

    async def _converse(self, call: ModelCall, engine: ConversationEngine) -> FinishReason:
        """As `_generate`, with an engine that answers in text: the ids are our renderer's, made when all is said."""
        assert self._spoken is not None
        request, spoken = self._arrival.request, self._spoken
        question = Question(
            conversation=call.conversation,
            images=self._images,
            forced=request.forced,
            model=request.model,
            prompt_tokens=self._prompt_tokens,
        )
        stream = engine.converse(
            question,
            call.sampling_applied,
            affinity=call.session_id,
            seed=call.call_id,
            deadline=self._session.deadline,
        )
        async with aclosing(cast(_Closing, stream)):
            async for chunk in stream:
                spoken.add(chunk)
                finish = self._finish_at(chunk.finish, chunk.deltas)
                if finish is not None:
                    if finish is not FinishReason.STOP_STRING:
                        self._keep(self._stops.flush())
                    self._sampled.add(await spoken.encoded(call, self._built.message(), finish))
                    self._session.sampled += spoken.counts(0, len(self._sampled.ids))[1]
                    return finish
                await self._send_unsent()
        raise EngineError("the engine ended an answer without a finish reason")

    async def _send_unsent(self) -> None:
        if self._unsent and self._arrival.request.stream:
            unsent, self._unsent = self._unsent, []
            await self._open()
            await self._send(self._writer.write(unsent))

    def _finish_at(self, finish: FinishReason | None, deltas: Sequence[MessageDelta]) -> FinishReason | None:
        """Take in a chunk; the finish reason when the answer ends with it, whoever ends it."""
        self._show(deltas)
        if finish is FinishReason.ABORTED:
            self.stopped_by = self.stopped_by or Ended.DEADLINE
            raise Stopped
        if finish is FinishReason.ERROR:
            raise EngineError("the engine reported an error without a reason")
        if self._stops.hit is not None:
            return FinishReason.STOP_STRING
        if finish is None and self._session.tokens_left is not None and self._session.tokens_left <= 0:
            return FinishReason.LENGTH
        return finish

    def _finished(self, finish: FinishReason, parser: AnswerParser) -> FinishReason:
        """Take in what the parser held back; check that the pieces are the whole."""
        tail, whole = parser.finish()
        self._show(tail)
        if self._stops.hit is not None:
            return FinishReason.STOP_STRING
        self._keep(self._stops.flush())
        self._built.expect(whole)
        return finish

    def _show(self, deltas: Sequence[MessageDelta]) -> None:
        self._keep(self._stops.feed(deltas))

    def _keep(self, deltas: Sequence[MessageDelta]) -> None:
        self._built.add(deltas)
        self._unsent += deltas

    def _message(self) -> Message:
        """The answer so far, its thought under the handle that the client was given for it."""
        message = self._built.message()
        parts = [
            Reasoning(part.text, self._head.handle) if isinstance(part, Reasoning) else part for part in message.parts
        ]
        return msgspec.structs.replace(message, parts=tuple(parts))

    async def _complete(self, call: ModelCall, finish: FinishReason) -> bytes:
        """Commit the finished call; its last bytes."""
        request = self._arrival.request
        if request.stream:
            await self._open()
        message = self._dialect.sent(self._message(), request)
        prompt_tokens, completion_tokens = self._prompt_tokens, len(self._sampled.ids)
        if self._spoken is not None:
            prompt_tokens, completion_tokens = self._spoken.counts(prompt_tokens, completion_tokens)
        answer = Answer(
            message=message,
            finish=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            stop_string=self._stops.hit,
            tokens=self._sampled.shown(self._gateway.renderer) if request.logprobs else None,
        )
        body = self._dialect.whole(self._head, request, answer)
        done = self._ended(call, CallStatus.COMPLETE, finish)
        await self._record(msgspec.structs.replace(done, answer=message, response=body))
        if self._arrival.request.stream:
            return self._writer.write(self._unsent) + self._writer.close(answer)
        return msgspec.json.encode(body)

    async def _failed(self, error: Exception) -> WireError | None:
        """Record a call that did not complete; what to tell the client, or None when it is gone."""
        status, told, reason = classified(error, self.stopped_by)
        logger.log(
            logging.ERROR if told is not None and told.status >= 500 else logging.INFO,
            "call %s of session %s: %s",
            self.call_id,
            self._session.record.session_id,
            reason,
            exc_info=error if told is not None and told.code == "internal_error" else None,
        )
        if self._call is not None:
            aborted = status is CallStatus.ABORTED
            finish = FinishReason.ABORTED if aborted else FinishReason.ERROR
            call = self._ended(self._call, status, finish)
            answer = None if self._built.empty else self._message()
            try:
                await self._record(msgspec.structs.replace(call, answer=answer, error=reason))
            except StoreError:
                logger.exception("call %s could not be recorded", self.call_id)
        return told

    def _ended(self, call: ModelCall, status: CallStatus, finish: FinishReason) -> ModelCall:
        call = self._sampled.onto(call, status=status, finish=finish)
        return call if self._spoken is None else self._spoken.onto(call)

    async def _record(self, call: ModelCall) -> None:
        await self._gateway.store.finish(call)
        self._call = None
        self._session.remember(call)

    async def _open(self) -> None:
        """Send the stream's opening, before anything else is written: writers count what they write."""
        async with self._sending:
            if not self._opened:
                self._opened = True
                await self._write(self._writer.open(self._prompt_tokens))

    async def _send(self, piece: bytes) -> None:
        """Send part of the answer."""
        async with self._sending:
            await self._write(piece)

    async def _write(self, piece: bytes) -> None:
        # What the dialect does not show (a thought) sends nothing, and so ends no silence.
        if piece:
            await self._outlet.write(piece)
            self._last_sent = time.monotonic()

    async def _keep_alive(self) -> None:
        """Comments while a stream is silent, so that no client gives up. Cancelled when the call is recorded."""
        interval = self._gateway.options.keep_alive_s
        while self._arrival.request.stream:
            silent = time.monotonic() - self._last_sent
            if silent < interval:
                await asyncio.sleep(interval - silent)
                continue
            try:
                async with self._sending:
                    await self._write(self._writer.keep_alive())
            except ClientLeft:
                self.abort(Ended.CLIENT_LEFT)
                return

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, unless the call is stopped before or meanwhile; then `work` is cancelled and awaited."""
        if self.stopped_by is not None:
            work.close()
            raise Stopped
        self._current = asyncio.create_task(work)
        try:
            return await self._current
        except asyncio.CancelledError:
            if self.stopped_by is None:
                raise
            raise Stopped from None
        finally:
            self._current = None


class _Closing(Protocol):
    """An iterator that can be closed early, as the engine protocol demands."""

    async def aclose(self) -> None: ...


def _applied(session: Sampling, request: Request, context_left: int, tokens_left: int | None, index: int) -> Sampling:
    """The session's sampling, the request's stop strings, and the smallest of all bounds on tokens.

    Every call of a seeded session has a seed of its own: with one and the same, all turns of an attempt would
    draw the same random numbers, and the attempt would not be a sample of the policy.
    """
    seed = None if session.seed is None else (session.seed + 0x9E3779B1 * index) & 0x7FFFFFFF
    bounds = (request.max_tokens, session.max_tokens, context_left, tokens_left)
    most = max(1, min(bound for bound in bounds if bound is not None))
    return msgspec.structs.replace(session, max_tokens=most, stop=request.stop, seed=seed)
