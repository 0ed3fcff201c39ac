"""Sessions: who may call, how much, and for how long. Keys are kept as sha256 only."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from openforgerl.errors import WireError
from openforgerl.proxy.known import KnownCalls, Restorable
from openforgerl.trajectory.breaks import PrefixWatch
from openforgerl.trajectory.histories import Histories
from openforgerl.types import (
    CallStatus,
    Conversation,
    FinishReason,
    JsonValue,
    Limits,
    Message,
    ModelCall,
    Reasoning,
    Sampling,
    Session,
    SessionState,
)
from openforgerl.wire.rereading import Rereading

SESSION_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""What a session id may look like: it is part of a URL path, and never needs escaping there."""

_THREADS = 4
"""How many threads of a session are looked at for messages that a request repeats."""
_NOBODY = "0" * 64
"""Compared against when there is no such session, so that both refusals take the same steps."""

INTERRUPTED = "interrupted: the proxy process ended during this call"
"""Why a call that was running when the process died is recorded as an error."""


class CallLog(Protocol):
    """What the proxy needs of the store. Every write returns only after it is committed."""

    async def put_session(self, session: Session) -> None: ...
    async def seal_session(self, session_id: str, at: float) -> None: ...
    async def sessions(self) -> Sequence[Session]: ...
    async def put_images(self, images: Mapping[str, bytes]) -> None: ...
    async def images(self, names: Collection[str]) -> Mapping[str, bytes]: ...
    async def begin(self, call: ModelCall) -> None: ...
    async def finish(self, call: ModelCall) -> None: ...
    async def calls(self, session_id: str, after: int = -1, limit: int | None = None) -> Sequence[ModelCall]: ...


class Ended(enum.StrEnum):
    """Why a call was stopped from outside."""

    CLIENT_LEFT = "client_left"
    SEALED = "session_sealed"
    DEADLINE = "session_deadline"
    SHUTDOWN = "proxy_shutdown"


class Running(Protocol):
    """A call in flight, as its session sees it."""

    @property
    def recorded(self) -> asyncio.Event:
        """Set when nothing of the call is left to be written to the store."""
        ...

    def abort(self, why: Ended) -> None: ...


class LiveSession:
    """One session while the proxy runs: its record, its use of its limits, its calls in flight."""

    def __init__(self, record: Session, calls: Sequence[ModelCall] = (), *, closing: asyncio.Event) -> None:
        self.record = record
        self._closing = closing
        """Set while the whole proxy shuts down."""
        self.admitted = len(calls)
        """Requests that counted against `limits.calls`."""
        self.sampled = sum(len(call.sampled_ids) for call in calls)
        """Tokens that counted against `limits.sampled_tokens`."""
        self._next_index = 1 + max((call.index for call in calls), default=-1)
        self._known = KnownCalls()
        self.histories = Histories()
        """The beginnings of its calls' conversations."""
        self._thoughts: dict[str, Reasoning] = {}
        self.breaks = PrefixWatch()
        self.rereading = Rereading()
        """What its earlier requests held (`wire.Memory`)."""
        for call in calls:
            self._known.put(call)
            self._keep_thoughts(call)
            self.breaks.arrived(call, self._known)
        self.prompting = asyncio.Lock()
        """Held while a call is attributed and rendered."""
        self.counting = asyncio.Lock()
        """Held while a prompt is only counted: an agent may ask for that without end."""
        self.reading = asyncio.Lock()
        """Held while a large body is read."""
        self._places = asyncio.Semaphore(record.limits.concurrent)
        self._running: set[Running] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def known(self) -> tuple[ModelCall, ...]:
        """Recorded calls in order of arrival, without raw bodies and prompts: what a new call may continue."""
        return self._known.light

    @property
    def by_id(self) -> Mapping[str, ModelCall]:
        """The same by call id, each with its prompt."""
        return self._known

    @property
    def ids_held(self) -> int:
        """Prompt ids that are in memory for later calls."""
        return self._known.ids_held

    def restorable(self, restored: Mapping[int, ModelCall]) -> Mapping[int, ModelCall]:
        """These calls of `known` with their prompts."""
        return Restorable(self._known, {at: call.call_id for at, call in restored.items()})

    @property
    def in_flight(self) -> int:
        """Calls being answered or waiting for a place."""
        return len(self._running)

    @property
    def deadline(self) -> float | None:
        """Unix seconds, or None."""
        seconds = self.record.limits.seconds
        return None if seconds is None else self.record.opened_at + seconds

    @property
    def tokens_left(self) -> int | None:
        """How many more tokens may be sampled, or None for any number."""
        limit = self.record.limits.sampled_tokens
        return None if limit is None else limit - self.sampled

    def check_open(self) -> None:
        """Raise 403 `session_closed` after sealing or the deadline, 503 `shutting_down` while the proxy stops."""
        if self.record.state is SessionState.SEALED:
            raise WireError(403, "session_closed", "this session is sealed; it takes no more calls")
        if self.deadline is not None and time.time() >= self.deadline:
            raise WireError(403, "session_closed", f"this session's {self.record.limits.seconds:g} seconds are over")
        if self._closing.is_set():
            raise shutting_down()

    def check_admissible(self) -> None:
        """Raise as `check_open`, or 403 `session_limit` naming the limit, when no more calls are taken."""
        self.check_open()
        limits = self.record.limits
        if limits.calls is not None and self.admitted >= limits.calls:
            raise _over("calls", f"{limits.calls} model calls")
        self.check_tokens()

    def admit(self) -> None:
        """Count one more call, unless `check_admissible` refuses it."""
        self.check_admissible()
        self.admitted += 1

    def check_tokens(self) -> None:
        """Raise 403 `session_limit` when the session's tokens are used up."""
        if self.tokens_left is not None and self.tokens_left <= 0:
            raise _over("sampled_tokens", f"{self.record.limits.sampled_tokens} sampled tokens")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a call on its own: it outlives the handler of a client that left, until it is recorded."""
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What `spawn` runs still, calls that are recorded and only send their last bytes included."""
        return tuple(self._tasks)

    @asynccontextmanager
    async def enrolled(self, call: Running) -> AsyncGenerator[None]:
        """Keep `call` among those that sealing and the deadline stop."""
        if self._timer is None and self.deadline is not None:
            wait = max(0.0, self.deadline - time.time())
            self._timer = asyncio.get_running_loop().call_later(wait, self.abort_all, Ended.DEADLINE)
        self._running.add(call)
        try:
            yield
        finally:
            self._running.discard(call)

    async def take_place(self) -> None:
        """Wait, in order of arrival, for one of the `limits.concurrent` places."""
        await self._places.acquire()

    def leave_place(self) -> None:
        """Give the place to the next call."""
        self._places.release()

    def take_index(self) -> int:
        """The next call's place in the order of arrival."""
        index = self._next_index
        self._next_index += 1
        return index

    def remember(self, call: ModelCall) -> None:
        """The newest state of a call, for the attribution of later ones."""
        if self.record.state is SessionState.OPEN:
            self._known.put(call)
            self._keep_thoughts(call)

    def forget(self, call_id: str) -> None:
        """A call that could not be recorded: nothing may be attributed to it."""
        self._known.forget(call_id)
        self.histories.forget(call_id)

    def reasoning(self, handle: str) -> Reasoning | None:
        """The thought that was given out under this handle (`wire.Memory`)."""
        return self._thoughts.get(handle)

    def answered(self, call_id: str) -> Conversation | None:
        """The conversation of a complete call with its answer as the last message (`wire.Memory`)."""
        call = self._known.lightly(call_id)
        if call is None or call.answer is None or call.status is not CallStatus.COMPLETE:
            return None
        return Conversation(messages=(*call.conversation.messages, call.answer), tools=call.conversation.tools)

    def _keep_thoughts(self, call: ModelCall) -> None:
        for part in call.answer.parts if call.answer is not None else ():
            if isinstance(part, Reasoning) and part.handle is not None:
                self._thoughts[part.handle] = part

    def recognised(self, conversation: Conversation) -> Conversation:
        """An equal conversation that shares the messages and tools of an earlier call instead of repeating them.

        Every request brings the whole history again: without this, memory would grow with its square, and everybody
        who looks at the history would have to compare messages instead of seeing that they are the very same.
        """
        messages, tools = conversation.messages, conversation.tools
        best: Sequence[Message] = ()
        for earlier in self._recent():
            common = _common(earlier.messages, messages)
            best = earlier.messages[:common] if common > len(best) else best
            tools = earlier.tools if earlier.tools == tools else tools
            if len(best) == len(messages):
                break
        return Conversation(messages=(*best, *messages[len(best) :]), tools=tools)

    def _recent(self) -> Iterator[Conversation]:
        """The conversations of the last calls, with their answers' places left out; of one thread only the last."""
        threads: set[str] = set()
        for call in reversed(self._known.light):
            if call.thread not in threads:
                threads.add(call.thread)
                yield call.conversation
            if len(threads) == _THREADS:
                return

    def abort_all(self, why: Ended) -> tuple[Running, ...]:
        """Stop every call in flight; those that were."""
        running = tuple(self._running)
        for call in running:
            call.abort(why)
        return running

    def close(self, at_seal: bool = True) -> None:
        """Take no more calls and forget what only new calls would need."""
        if at_seal:
            self.record = msgspec.structs.replace(self.record, state=SessionState.SEALED)
            self._known.clear()
            self.histories = Histories()
            self._thoughts.clear()
            self.rereading.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SessionRegistry:
    """All sessions of one store."""

    def __init__(self, store: CallLog) -> None:
        self._store = store
        self._live: dict[str, LiveSession] = {}
        self._opening: set[str] = set()
        self._closing = asyncio.Event()

    @property
    def sessions(self) -> tuple[LiveSession, ...]:
        """Every session, in order of opening."""
        return tuple(self._live.values())

    async def load(self) -> int:
        """Take over what the store holds; how many calls a dead process left behind as intents.

        Those become errors with a reason: whatever they sampled is gone, and nothing was delivered as whole.
        """
        self._closing.clear()
        interrupted = 0
        for session in await self._store.sessions():
            if session.state is SessionState.SEALED:
                self._live[session.session_id] = LiveSession(session, closing=self._closing)
                continue
            calls = list(await self._store.calls(session.session_id))
            for at, call in enumerate(calls):
                if call.status is CallStatus.INTENT:
                    timing = msgspec.structs.replace(call.timing, finished=time.time())
                    calls[at] = msgspec.structs.replace(
                        call,
                        status=CallStatus.ERROR,
                        finish_reason=FinishReason.ERROR,
                        error=INTERRUPTED,
                        timing=timing,
                    )
                    await self._store.finish(calls[at])
                    interrupted += 1
            self._live[session.session_id] = LiveSession(session, calls, closing=self._closing)
        return interrupted

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: Limits,
        metadata: Mapping[str, str],
        template_kwargs: Mapping[str, JsonValue],
    ) -> tuple[LiveSession, str]:
        """A new session and its key, which is in clear only here. WireError 400 or 409 about the id."""
        if SESSION_ID.fullmatch(session_id) is None:
            raise WireError(
                400,
                "invalid_request",
                f"session_id must be 1 to 128 of A-Z a-z 0-9 _ - . and not begin with a dot; got {session_id!r}",
                param="session_id",
            )
        if session_id in self._live or session_id in self._opening:
            raise WireError(409, "session_exists", f"session {session_id!r} exists already", param="session_id")
        key = secrets.token_hex(32)
        record = Session(
            session_id=session_id,
            key_sha256=_digest(key),
            state=SessionState.OPEN,
            opened_at=time.time(),
            sampling=sampling,
            limits=limits,
            template_kwargs=dict(template_kwargs),
            metadata=dict(metadata),
        )
        self._opening.add(session_id)
        try:
            await self._store.put_session(record)
            self._live[session_id] = LiveSession(record, closing=self._closing)
        finally:
            self._opening.discard(session_id)
        return self._live[session_id], key

    def authenticate(self, session_id: str, key: str) -> LiveSession:
        """The session of that id, if `key` is its key. WireError 404 or 401, of one shape and by the same steps."""
        live = self._live.get(session_id)
        expected = _NOBODY if live is None else live.record.key_sha256
        good = hmac.compare_digest(_digest(key), expected)
        if live is None:
            raise WireError(404, "session_not_found", "there is no such session")
        if not good:
            raise WireError(401, "invalid_api_key", "the API key is not this session's key")
        return live

    def get(self, session_id: str) -> LiveSession:
        """The session of that id; WireError 404."""
        live = self._live.get(session_id)
        if live is None:
            raise WireError(404, "session_not_found", f"there is no session {session_id!r}", param="session_id")
        return live

    async def seal(self, session_id: str) -> None:
        """Refuse further calls, stop those in flight, wait until all are recorded, commit. Idempotent."""
        live = self.get(session_id)
        live.close()
        for call in live.abort_all(Ended.SEALED):
            await call.recorded.wait()
        # Every time: an earlier seal may have failed or been cancelled before it reached the store.
        await self._store.seal_session(session_id, time.time())

    async def shut_down(self) -> None:
        """Take no more calls, stop those in flight, wait until they are recorded; sessions stay open in the store."""
        self._closing.set()
        running = [call for live in self._live.values() for call in live.abort_all(Ended.SHUTDOWN)]
        for call in running:
            await call.recorded.wait()
        for live in self._live.values():
            live.close(at_seal=False)

    async def drain(self) -> None:
        """After `shut_down`, once no request is served any more: wait for the end of every call's own task."""
        await self.shut_down()
        tasks = [task for live in self._live.values() for task in live.tasks]
        if tasks:
            await asyncio.wait(tasks)


def shutting_down() -> WireError:
    """What a client is told while the proxy stops: another one may be there soon."""
    return WireError(503, "shutting_down", "server error 503: the proxy is stopping", retry_after=5)


def _common(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages at the beginning are equal."""
    return next(
        (at for at, (old, new) in enumerate(zip(left, right, strict=False)) if old is not new and old != new),
        min(len(left), len(right)),
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _over(name: str, what: str) -> WireError:
    return WireError(403, "session_limit", f"this session's limit of {what} is used up", param=f"limits.{name}")
