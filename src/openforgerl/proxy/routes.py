"""What the data port serves: one table of dialect, method, path and action. Paths stand below `/s/{session_id}`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Action(enum.StrEnum):
    """What is done with a request."""

    ANSWER = "answer"
    """One model call."""
    COUNT = "count"
    """The size of a prompt in tokens; nothing is sampled or recorded."""
    MODELS = "models"
    MODEL = "model"
    """One model by the name in the path; every name is answered by the served model, so every name exists."""
    PROBE = "probe"
    """Is anybody there? Told to everyone, with nothing in it."""


class Route(msgspec.Struct, frozen=True):
    """One door."""

    dialect: str
    method: str
    path: str
    """As aiohttp writes it; `{model}` is what the path names."""
    action: Action
    stream: bool | None = None
    """What the path says about streaming; None = the body says."""


_MODEL = "{model:.+}"

ROUTES: tuple[Route, ...] = (
    Route("chat", "POST", "/v1/chat/completions", Action.ANSWER),
    Route("chat", "GET", "/v1/models", Action.MODELS),
    Route("chat", "GET", f"/v1/models/{_MODEL}", Action.MODEL),
    Route("responses", "POST", "/v1/responses", Action.ANSWER),
    Route("responses", "POST", "/v1/responses/input_tokens", Action.COUNT),
    Route("messages", "POST", "/v1/messages", Action.ANSWER),
    Route("messages", "POST", "/v1/messages/count_tokens", Action.COUNT),
    Route("messages", "HEAD", "", Action.PROBE),
    Route("messages", "HEAD", "/", Action.PROBE),
    Route("messages", "HEAD", "/api/hello", Action.PROBE),
    Route("messages", "GET", "/api/hello", Action.PROBE),
    *(
        route
        for version in ("/v1beta", "/v1")
        for route in (
            Route("gemini", "POST", f"{version}/models/{_MODEL}:generateContent", Action.ANSWER, stream=False),
            Route("gemini", "POST", f"{version}/models/{_MODEL}:streamGenerateContent", Action.ANSWER, stream=True),
            Route("gemini", "POST", f"{version}/models/{_MODEL}:countTokens", Action.COUNT, stream=False),
        )
    ),
    Route("gemini", "GET", "/v1beta/models", Action.MODELS),
    Route("gemini", "GET", f"/v1beta/models/{_MODEL}", Action.MODEL),
)
"""`GET /v1/models` is answered in the shape of whoever asks (`dialect_of`)."""

BASE_PATHS: Mapping[str, str] = MappingProxyType({"chat": "/v1", "responses": "/v1", "messages": "", "gemini": ""})
"""Dialect → what its clients' base URL ends in, after `/s/{session_id}`: they append the rest themselves."""

_FAMILIES: tuple[tuple[str, str], ...] = (
    ("/v1/responses", "responses"),
    ("/v1/messages", "messages"),
    ("/api/", "messages"),
    ("/v1beta", "gemini"),
    ("/v1/chat/", "chat"),
)
_VERBS = (":generateContent", ":streamGenerateContent", ":countTokens")
_CALLERS: tuple[tuple[str, str], ...] = (("anthropic-version", "messages"), ("x-goog-api-key", "gemini"))
"""Headers that only one dialect's clients send."""


def below_session(path: str) -> str:
    """What follows `/s/{session_id}` in a path."""
    return "/" + path.removeprefix("/s/").partition("/")[2]


def dialect_of(path: str, headers: Mapping[str, str]) -> str:
    """Name of the dialect in which a request below `/s/{session_id}` is spoken, also where nothing is served.

    By the path; where several dialects share one (`/v1/models`), by the headers; else chat. `headers` looks names
    up in any case.
    """
    below = below_session(path)
    for prefix, name in _FAMILIES:
        if below.startswith(prefix):
            return name
    if below.startswith("/v1/models/") and below.endswith(_VERBS):
        return "gemini"
    return next((name for header, name in _CALLERS if header in headers), "chat")
