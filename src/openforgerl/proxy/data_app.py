"""The data port: what agents reach. `/s/{session_id}/v1/...`, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from openforgerl.errors import WireError
from openforgerl.proxy.exchange import Arrival, ClientLeft, Exchange, Gateway
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.sessions import Ended, LiveSession
from openforgerl.wire import ChatDialect, Dialect

logger = logging.getLogger(__name__)

GATEWAY = web.AppKey("gateway", Gateway)

_CHAT: Dialect = ChatDialect()
_PREFIX = "/s/{session_id:[^/]+}/v1"
_CREDENTIALS = frozenset(
    {"authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "set-cookie"}
)
"""Headers that are recorded nowhere."""

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
    app.router.add_post(f"{_PREFIX}/chat/completions", chat_completions)
    app.router.add_get(f"{_PREFIX}/models", list_models, allow_head=False)
    app.router.add_get(f"{_PREFIX}/models/{{name:.+}}", one_model, allow_head=False)
    return app


@web.middleware
async def shaped_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in the dialect's own shape; a path that was not written in its plain form is not found."""
    try:
        path = request.raw_path.partition("?")[0]
        if path != request.path or "//" in path or any(step in (".", "..") for step in path.split("/")):
            raise WireError(404, "not_found", "no such path")
        return await handler(request)
    except WireError as error:
        return error_response(_CHAT, error)
    except web.HTTPException as error:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "http_error")
        message = f"{request.method} {request.path} is not served here" if error.status in (404, 405) else error.reason
        response = error_response(_CHAT, WireError(error.status, code, message))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(_CHAT, WireError(500, "internal_error", "the proxy failed; its log says why"))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST .../chat/completions`."""
    return await answer(request, _CHAT)


async def answer(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    """One model call in any dialect. The exchange runs on when the handler is cancelled, until it is recorded."""
    gateway = request.app[GATEWAY]
    received = time.time()
    session = session_of(request, gateway)
    session.check_admissible()  # before the body: a session that is used up costs no parsing
    body = await read_body(request, gateway.options)
    parsed = dialect.parse(body, strict=gateway.options.strict_fields)
    session.admit()
    request.app[UNLISTED].note(dialect.name, parsed.unlisted)
    arrival = Arrival(request=parsed, headers=recorded_headers(request), received=received)
    outlet = HttpOutlet(request, dialect, gateway.options)
    exchange = Exchange(gateway, session, dialect, arrival, outlet)
    task = session.spawn(exchange.run())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        exchange.abort(Ended.CLIENT_LEFT)
        raise
    return outlet.response


async def list_models(request: web.Request) -> web.StreamResponse:
    """`GET .../models`."""
    gateway = request.app[GATEWAY]
    session_of(request, gateway).check_open()
    return _json(200, _CHAT.models([gateway.engine.model_name]))


async def one_model(request: web.Request) -> web.StreamResponse:
    """`GET .../models/{name}`: every name is answered by the served model, so every name exists."""
    gateway = request.app[GATEWAY]
    session_of(request, gateway).check_open()
    return _json(200, _CHAT.models([request.match_info["name"]])["data"][0])


def session_of(request: web.Request, gateway: Gateway) -> LiveSession:
    """The session whose id is in the path and whose key is in the one `Authorization: Bearer` header."""
    given = request.headers.getall("Authorization", [])
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        key = ""
    return gateway.sessions.authenticate(request.match_info["session_id"], key.strip())


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


def recorded_headers(request: web.Request) -> dict[str, str]:
    """The request's headers without credentials, names in lower case."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        lower = name.lower()
        if lower not in _CREDENTIALS:
            headers[lower] = f"{headers[lower]}, {value}" if lower in headers else value
    return headers


class HttpOutlet:
    """Sends one answer over HTTP. What is not a stream is kept as `response`, for the handler to return."""

    def __init__(self, request: web.Request, dialect: Dialect, options: ProxyOptions) -> None:
        self._request = request
        self._dialect = dialect
        self._patience = options.write_timeout_s
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
        self._response = web.Response(body=body, content_type="application/json")

    async def fail(self, error: WireError, event: bytes) -> None:
        """An error answer; in a started stream the event, and then the connection is cut without an end mark.

        A stream that only stops would look like a short answer to a client that does not read error events.
        """
        if not self._started:
            self._response = error_response(self._dialect, error)
            return
        await self.write(event)
        if self._request.transport is not None:
            self._request.transport.close()


def error_response(dialect: Dialect, error: WireError) -> web.Response:
    """An error in the dialect's shape."""
    response = _json(error.status, dialect.error(error))
    response.headers.update(error_headers(error))
    return response


def error_headers(error: WireError) -> dict[str, str]:
    """Retry-After in whole seconds, when the error says when to come back."""
    return {} if error.retry_after is None else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}


def _json(status: int, body: object) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
