"""The control port: sessions are opened, sealed and read here. Every door but two needs the control token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from openforgerl.errors import ExactnessError, StoreError, WireError
from openforgerl.proxy.data_app import UnlistedFields, error_headers, read_body
from openforgerl.proxy.exchange import Gateway
from openforgerl.proxy.openapi import document
from openforgerl.proxy.samples import session_samples
from openforgerl.proxy.views import (
    CallPage,
    ErrorDetail,
    ErrorView,
    Health,
    OpenSession,
    RecordPage,
    SealedSession,
    call_view,
    samples_view,
)
from openforgerl.types import Limits, ModelCall, OpenedSession, Sampling, Session
from openforgerl.wire.reading import decode_object, mapping

logger = logging.getLogger(__name__)

PAGE = 100
"""Calls in a page unless `limit` says otherwise."""
LARGEST_PAGE = 1000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the doors depend on."""

    gateway: Gateway
    token_sha256: bytes
    base_urls: Callable[[str], dict[str, str]]
    """Session id → dialect → URL."""
    unlisted: UnlistedFields


CONTROL = web.AppKey("control", Control)


def control_app(
    gateway: Gateway, token: str, *, base_urls: Callable[[str], dict[str, str]], unlisted: UnlistedFields
) -> web.Application:
    """The application behind the control port."""
    app = web.Application(middlewares=[guarded])
    digest = hashlib.sha256(token.encode()).digest()
    app[CONTROL] = Control(gateway=gateway, token_sha256=digest, base_urls=base_urls, unlisted=unlisted)
    app.router.add_post("/v1/sessions", open_session)
    app.router.add_post("/v1/sessions/{session_id}/seal", seal_session)
    app.router.add_get("/v1/sessions/{session_id}/calls", session_calls)
    app.router.add_get("/v1/sessions/{session_id}/samples", samples_of_session)
    app.router.add_get("/v1/images/{sha256}", image)
    app.router.add_get("/healthz", health)
    app.router.add_get("/openapi.json", openapi)
    return app


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the token, and give every refusal one shape."""
    try:
        if request.path not in ("/healthz", "/openapi.json"):
            _check_token(request)
        return await handler(request)
    except WireError as error:
        return _refusal(error)
    except web.HTTPException as error:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "http_error")
        return _refusal(WireError(error.status, code, f"{request.method} {request.path} is not served here"))
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _refusal(WireError(500, "internal_error", "the proxy failed; its log says why"))


async def open_session(request: web.Request) -> web.StreamResponse:
    """`POST /v1/sessions`."""
    gateway = request.app[CONTROL].gateway
    wanted = _wanted(await read_body(request, gateway.options))
    session_id = wanted.session_id if wanted.session_id is not None else secrets.token_hex(16)
    _, key = await gateway.sessions.open(
        session_id,
        sampling=wanted.sampling,
        limits=wanted.limits,
        metadata=wanted.metadata,
        template_kwargs=wanted.template_kwargs,
    )
    return _json(OpenedSession(session_id=session_id, key=key, base_urls=request.app[CONTROL].base_urls(session_id)))


async def seal_session(request: web.Request) -> web.StreamResponse:
    """`POST /v1/sessions/{id}/seal`. Runs to its end even when the caller hangs up."""
    session_id = request.match_info["session_id"]
    await asyncio.shield(request.app[CONTROL].gateway.sessions.seal(session_id))
    return _json(SealedSession(session_id=session_id))


async def session_calls(request: web.Request) -> web.StreamResponse:
    """`GET /v1/sessions/{id}/calls?after&limit&form`."""
    gateway = request.app[CONTROL].gateway
    session_id = gateway.sessions.get(request.match_info["session_id"]).record.session_id
    _check_query(request, {"after", "limit", "form"})
    after = _number(request, "after", -1, low=-1)
    limit = _number(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
    form = request.query.get("form", "view")
    if form not in ("view", "record"):
        raise WireError(400, "invalid_request", f"form must be view or record; got {form!r}", param="form")
    found = list(await gateway.store.calls(session_id, after, limit + 1))
    calls, more = found[:limit], len(found) > limit
    following = calls[-1].index if more else None
    if form == "record":
        return _json(RecordPage(calls=tuple(calls), next=following))
    return _json(CallPage(calls=tuple(map(call_view, calls)), next=following))


async def samples_of_session(request: web.Request) -> web.StreamResponse:
    """`GET /v1/sessions/{id}/samples`."""
    gateway = request.app[CONTROL].gateway
    record = gateway.sessions.get(request.match_info["session_id"]).record
    _check_query(request, set())
    calls = await gateway.store.calls(record.session_id)
    try:
        # In a thread: of a long session it takes seconds, and agents wait for their answers meanwhile.
        body = await asyncio.to_thread(_samples_body, record, calls)
    except ExactnessError as error:
        raise WireError(500, "exactness_error", str(error)) from error
    return web.Response(body=body, content_type="application/json")


async def image(request: web.Request) -> web.StreamResponse:
    """`GET /v1/images/{sha256}`: the bytes of an image that some call's prompt names."""
    name = request.match_info["sha256"]
    try:
        found = await request.app[CONTROL].gateway.store.images([name])
    except StoreError as error:
        raise WireError(404, "image_not_found", str(error), param="sha256") from error
    return web.Response(body=found[name], content_type="application/octet-stream")


async def health(request: web.Request) -> web.StreamResponse:
    """`GET /healthz`."""
    gateway = request.app[CONTROL].gateway
    sessions = gateway.sessions.sessions
    return _json(
        Health(
            status="ok",
            model=gateway.engine.model_name,
            weights_version=gateway.engine.weights_version,
            sessions=len(sessions),
            in_flight=sum(session.in_flight for session in sessions),
            unlisted_fields=dict(request.app[CONTROL].unlisted.counts),
        )
    )


async def openapi(request: web.Request) -> web.StreamResponse:
    """`GET /openapi.json`."""
    return _json(document())


def _check_token(request: web.Request) -> None:
    given = request.headers.getall("Authorization", [])
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
    if not hmac.compare_digest(digest, request.app[CONTROL].token_sha256) or scheme.lower() != "bearer":
        raise WireError(401, "invalid_token", "give the control token as `Authorization: Bearer TOKEN`")


def _wanted(body: bytes) -> OpenSession:
    given = decode_object(body)[0] if body.strip() else {}
    for name, struct in (("", OpenSession), ("sampling", Sampling), ("limits", Limits)):
        fields = given if not name else mapping(given.get(name) or {}, name)
        for field in fields:
            if field not in struct.__struct_fields__:
                path = f"{name}.{field}" if name else field
                accepted = ", ".join(struct.__struct_fields__)
                raise WireError(400, "invalid_request", f"{path}: unknown field; accepted: {accepted}", param=path)
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, OpenSession)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = path.removesuffix("`") or None
        raise WireError(400, "invalid_request", f"{field or 'body'}: {message}", param=field) from error


def _check_query(request: web.Request, accepted: set[str]) -> None:
    for name in request.query:
        if name not in accepted:
            listed = ", ".join(sorted(accepted)) or "none"
            raise WireError(400, "invalid_request", f"{name}: unknown query field; accepted: {listed}", param=name)


def _number(request: web.Request, name: str, default: int, *, low: int, high: int | None = None) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    text = given.removeprefix("-")
    value = int(given) if text.isascii() and text.isdigit() and len(text) < 19 else None
    if value is None or value < low or (high is not None and value > high):
        upper = "" if high is None else f" to {high}"
        raise WireError(400, "invalid_request", f"{name} must be a number from {low}{upper}; got {given!r}", param=name)
    return value


def _samples_body(record: Session, calls: Sequence[ModelCall]) -> bytes:
    return msgspec.json.encode(samples_view(session_samples(record, calls)))


def _refusal(error: WireError) -> web.Response:
    response = _json(
        ErrorView(error=ErrorDetail(code=error.code, message=error.message, param=error.param)), error.status
    )
    response.headers.update(error_headers(error))
    return response


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
