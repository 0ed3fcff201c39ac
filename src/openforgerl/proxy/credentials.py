"""A session's key in a request, in the spelling of any dialect's clients; and what of a request may be recorded."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from aiohttp import web

from openforgerl.proxy.routes import below_session

KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Headers that carry a bare key; `Authorization` carries it after `Bearer`."""
KEY_QUERY = "key"
"""Query field that carries a key (Gemini)."""

TARGET = ":path"
"""Name under which the request's target is recorded with its headers: no header can have it."""

_CREDENTIALS = frozenset(
    {"authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "set-cookie"}
)
"""Headers that are recorded nowhere."""


def given_key(request: web.Request) -> str:
    """The key that the request gives; "" when it gives none, one that cannot be one, or two that differ.

    Clients of one dialect may send theirs in several places at once; a place may be used once only.
    """
    places = [
        [_bearer(value) for value in request.headers.getall("Authorization", [])],
        *(request.headers.getall(name, []) for name in KEY_HEADERS),
        request.query.getall(KEY_QUERY, []),
    ]
    keys = [key for place in places for key in place]
    once = all(len(place) <= 1 for place in places)
    return keys[0] if keys and once and len(set(keys)) == 1 else ""


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def recorded_headers(request: web.Request) -> dict[str, str]:
    """The request's headers without credentials, names in lower case, and its target (`recorded_target`).

    A client may repeat the session's key in a header of its own making: whatever holds it is left out.
    """
    headers = {TARGET: recorded_target(request)}
    key = given_key(request)
    for name, value in request.headers.items():
        lower = name.lower()
        if lower not in _CREDENTIALS and not (key and (key in value or key in lower)):
            headers[lower] = f"{headers[lower]}, {value}" if lower in headers else value
    return headers


def recorded_target(request: web.Request) -> str:
    """Path below the session, and query without a key, under whatever name."""
    path = below_session(request.path)
    key = given_key(request)
    query = [
        (name, value)
        for name, value in parse_qsl(request.query_string, keep_blank_values=True)
        if name != KEY_QUERY and not (key and (key in value or key in name))
    ]
    return f"{path}?{urlencode(query)}" if query else path
