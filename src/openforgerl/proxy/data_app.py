"""The data port: what agents reach. The doors of `routes.py` below `/s/{session_id}`, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec
from aiohttp import web

from openforgerl.errors import TemplateError, WireError
from openforgerl.protocols import ConversationEngine
from openforgerl.proxy.credentials import given_key, recorded_headers
from openforgerl.proxy.exchange import Arrival, Exchange, Gateway
from openforgerl.proxy.failures import ClientLeft, unrenderable
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.placing import place
from openforgerl.proxy.prompting import checked_length, images_of, render_prompt
from openforgerl.proxy.routes import ROUTES, Action, Route, dialect_of
from openforgerl.proxy.sessions import Ended, LiveSession
from openforgerl.types import JsonValue
from openforgerl.wire import Address, Dialect
from openforgerl.wire import Request as Parsed

logger = logging.getLogger(__name__)

GATEWAY = web.AppKey("gateway", Gateway)

LARGE_BODY = 200_000
"""Bytes from which on a body is read in a thread: that takes some milliseconds."""

_PREFIX = "/s/{session_id:[^/]+}"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnlistedFields:
    """Counts request fields that no table lists, and warns about each once. Bounded: agents choose the names."""

    MOST = 1000
    LONGEST = 100
    """Characters of a name; the rest is cut."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, dialect: str, names: Sequence[str]) -> None:
        """One request had these. Past `MOST` names, new ones are counted together as `...`."""
        for name in names:
            key = f"{dialect}:{name[: self.LONGEST]}"
            if key not in self.counts and len(self.counts) >= self.MOST:
                key = f"{dialect}:..."
            elif key not in self.counts:
                logger.warning(
                    "%s requests carry %r, which the field table does not list", dialect, name[: self.LONGEST]
                )
            self.counts[key] += 1


UNLISTED = web.AppKey("unlisted", UnlistedFields)


def data_app(gateway: Gateway) -> web.Application:
    """The application behind the data port, the Unix socket and every added listener."""
    app = web.Application(middlewares=[shaped_errors])
    app[GATEWAY] = gateway
    app[UNLISTED] = UnlistedFields()
    app.on_response_prepare.append(identified)
    for route in ROUTES:
        if route.dialect in gateway.dialects:
            app.router.add_route(route.method, _PREFIX + route.path, partial(_ACTIONS[route.action], route))
    return app


@web.middleware
async def shaped_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in the dialect's own shape; a path that was not written in its plain form is not found."""
    dialect = spoken(request)
    try:
        path = request.raw_path.partition("?")[0]
        if path != request.path or "//" in path or any(step in (".", "..") for step in path.split("/")):
            raise WireError(404, "not_found", "no such path")
        return await handler(request)
    except WireError as error:
        return error_response(dialect, error)
    except web.HTTPException as error:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "http_error")
        message = f"{request.method} {request.path} is not served here" if error.status in (404, 405) else error.reason
        response = error_response(dialect, WireError(error.status, code, message))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(dialect, WireError(500, "internal_error", "the proxy failed; its log says why"))


async def identified(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request in its answer, as client logs expect it: with its call's id where it is one."""
    request_id = response.headers.setdefault("x-request-id", uuid.uuid4().hex)
    if spoken(request).name == "messages":
        response.headers["request-id"] = request_id


def spoken(request: web.Request) -> Dialect:
    """The dialect that the client of this request understands."""
    dialects = request.app[GATEWAY].dialects
    name = dialect_of(request.path, request.headers)
    return dialects.get(name) or dialects["chat"]


async def answer(route: Route, request: web.Request) -> web.StreamResponse:
    """One model call in any dialect. The exchange runs on when the handler is cancelled, until it is recorded."""
    gateway = request.app[GATEWAY]
    dialect = gateway.dialects[route.dialect]
    received = time.time()
    session = session_of(request, gateway)
    session.check_admissible()  # before the body: a session that is used up costs no parsing
    body = await read_body(request, gateway.options)
    address = _address(route, request)
    parsed = await understood(dialect, body, session, strict=gateway.options.strict_fields, address=address)
    session.admit()
    request.app[UNLISTED].note(dialect.name, parsed.unlisted)
    arrival = Arrival(call_id=uuid.uuid4().hex, request=parsed, headers=recorded_headers(request), received=received)
    outlet = HttpOutlet(request, dialect, arrival.call_id, gateway.options)
    exchange = Exchange(gateway, session, dialect, arrival, outlet)
    task = session.spawn(exchange.run())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        exchange.abort(Ended.CLIENT_LEFT)
        raise
    return outlet.response


async def count(route: Route, request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of the same request would have as a call: sampled turns restored, a forced call
    opened. But it is none: nothing is recorded, remembered or counted against a limit.
    """
    gateway = request.app[GATEWAY]
    dialect = gateway.dialects[route.dialect]
    session = session_of(request, gateway)
    session.check_open()
    body = await read_body(request, gateway.options)
    address = _address(route, request)
    parsed = await understood(dialect, body, session, strict=gateway.options.strict_fields, address=address)
    length = checked_length(parsed.conversation, gateway.engine)
    images = await images_of(parsed, gateway.store)
    async with session.counting:
        placed = place(session, parsed, recorded_headers(request), gateway.options)
        try:
            prompt = await render_prompt(
                gateway.renderer,
                session.record,
                placed.conversation,
                length=length,
                restored=session.restorable(placed.found.restored),
                images=images,
                forced=None if isinstance(gateway.engine, ConversationEngine) else parsed.forced,
            )
        except TemplateError as error:
            raise unrenderable(error) from error
    return _json(200, dialect.counted(len(prompt.ids)))


async def list_models(route: Route, request: web.Request) -> web.StreamResponse:
    """The served model, in the shape of whoever asks."""
    gateway = request.app[GATEWAY]
    session_of(request, gateway).check_open()
    return _json(200, spoken(request).models([gateway.engine.model_name]))


async def one_model(route: Route, request: web.Request) -> web.StreamResponse:
    """The model of that name: every name is answered by the served model, so every name exists."""
    gateway = request.app[GATEWAY]
    session_of(request, gateway).check_open()
    listed = spoken(request).models([request.match_info["model"]])
    return _json(200, next(value for value in listed.values() if isinstance(value, list))[0])


async def probe(route: Route, request: web.Request) -> web.StreamResponse:
    """Somebody is here. Says the same to everyone, so it needs no key."""
    return _json(200, {"status": "ok"})


async def understood(dialect: Dialect, body: bytes, session: LiveSession, *, strict: bool, address: Address) -> Parsed:
    """The request in `body`. A large one is read in a thread, one of a session at a time: other calls go on meanwhile,
    and no agent can take more than one processor. Raises WireError as `Dialect.parse` does.
    """
    work = partial(dialect.parse, body, strict=strict, address=address, memory=session)
    if len(body) < LARGE_BODY:
        return work()
    async with session.reading:
        return await asyncio.to_thread(work)


_ACTIONS: Mapping[Action, Callable[[Route, web.Request], Awaitable[web.StreamResponse]]] = MappingProxyType(
    {
        Action.ANSWER: answer,
        Action.COUNT: count,
        Action.MODELS: list_models,
        Action.MODEL: one_model,
        Action.PROBE: probe,
    }
)


def _address(route: Route, request: web.Request) -> Address:
    if route.stream and request.query.get("alt") != "sse":
        # What this path sends otherwise is one JSON array, piece by piece; a client that reads that cannot read events.
        message = "alt: a stream is sent as server-sent events only; ask for it with `?alt=sse`"
        raise WireError(400, "unsupported_field", message, param="alt")
    return Address(model=request.match_info.get("model", ""), stream=route.stream)


def session_of(request: web.Request, gateway: Gateway) -> LiveSession:
    """The session whose id is in the path and whose key the request carries."""
    return gateway.sessions.authenticate(request.match_info["session_id"], given_key(request))


async def read_body(request: web.Request, options: ProxyOptions) -> bytes:
    """The request body. WireError 413 when too large, 415 when compressed, 408 when it does not come."""
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding != "identity":
        raise WireError(415, "unsupported_encoding", f"Content-Encoding {coding} is not taken; send the body plain")
    limit = int(options.body_limit_mb * 2**20)
    too_large = WireError(413, "request_too_large", f"the request body is larger than {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(options.read_timeout_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        raise WireError(408, "request_timeout", "the request body did not arrive in time") from error
    return bytes(body)


_APART = 0.2
"""Seconds between an answer and the error that ends it: some clients (Google's) read it only in a piece of its own."""


class HttpOutlet:
    """Sends one answer over HTTP. What is not a stream is kept as `response`, for the handler to return."""

    def __init__(self, request: web.Request, dialect: Dialect, call_id: str, options: ProxyOptions) -> None:
        self._request = request
        self._dialect = dialect
        self._named = {"x-request-id": call_id}
        self._patience = options.write_timeout_s
        self._parting = options.parting_s
        self._response: web.StreamResponse | None = None
        self._started = False

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns. When nobody is there to read it, it is a placeholder."""
        return self._response if self._response is not None else web.Response(status=499)

    async def write(self, piece: bytes) -> None:
        """Part of a stream; the first one sends the head. Raises ClientLeft."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientLeft
        try:
            async with asyncio.timeout(self._patience):
                if self._response is None:
                    self._response = web.StreamResponse(
                        headers={
                            "Content-Type": "text/event-stream; charset=utf-8",
                            "Cache-Control": "no-cache",
                            "X-Accel-Buffering": "no",
                            **self._named,
                        }
                    )
                if not self._started:
                    await self._response.prepare(self._request)
                    self._started = True
                await self._response.write(piece)
        except TimeoutError as error:
            transport.abort()
            raise ClientLeft from error
        except ConnectionError as error:
            raise ClientLeft from error

    async def whole(self, body: bytes) -> None:
        """A whole JSON answer."""
        self._response = web.Response(body=body, content_type="application/json", headers=self._named)

    async def fail(self, error: WireError, event: bytes, *, patient: bool) -> None:
        """An error answer; in a started stream the event, and then the connection is cut without an end mark.

        A stream that only stops would look like a short answer to a client that does not read error events. One that
        does read them closes the connection itself; until then it may take the cut for a lost connection, since many
        throw away what they have not read yet when they see it.
        """
        if not self._started:
            self._response = error_response(self._dialect, error)
            self._response.headers.update(self._named)
            return
        if patient:
            await asyncio.sleep(min(_APART, self._parting))
        await self.write(event)
        if not self._dialect.cut_after_failure:
            return
        last = time.monotonic() + (self._parting if patient else 0.0)
        # Asked again and again: that its client left is told to the request's handler, which this need not be.
        while self._connected() and time.monotonic() < last:  # noqa: ASYNC110
            await asyncio.sleep(min(0.05, self._parting))
        if self._request.transport is not None:
            self._request.transport.close()

    def _connected(self) -> bool:
        transport = self._request.transport
        return transport is not None and not transport.is_closing()


def error_response(dialect: Dialect, error: WireError) -> web.Response:
    """An error in the dialect's shape."""
    response = _json(dialect.status(error), dialect.error(error))
    response.headers.update(error_headers(error))
    return response


def error_headers(error: WireError) -> dict[str, str]:
    """Retry-After in whole seconds, when the error says when to come back, and always with a 429.

    Some harnesses (codex) do not try again without one.
    """
    seconds = error.retry_after if error.retry_after is not None or error.status != 429 else 1.0
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def _json(status: int, body: JsonValue) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
