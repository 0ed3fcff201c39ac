"""The control API's OpenAPI document, built from the structs that the doors take and give."""

from __future__ import annotations

from typing import Any

import msgspec

from openforgerl.proxy.routes import BASE_PATHS
from openforgerl.proxy.views import (
    BODIES,
    CallPage,
    ErrorView,
    Health,
    OpenSession,
    RecordPage,
    SamplesView,
    SealedSession,
)
from openforgerl.types import OpenedSession

_BASE_URLS = (
    "`base_urls` names every served dialect with the base URL that its clients are given: "
    + ", ".join(f"`{name}` ends in `/s/{{session_id}}{end}`" for name, end in BASE_PATHS.items())
    + ". The key goes into Authorization: Bearer, x-api-key, x-goog-api-key or the query `key`."
)
_SESSION = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
_QUERY = (
    ("after", {"type": "integer", "minimum": -1, "default": -1}, "Index of the last call already seen."),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "Most calls in the answer."),
    ("form", {"enum": ["view", "record"], "default": "view"}, "`record` gives the calls whole."),
)


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    query = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, schema, text in _QUERY
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenForgeRL proxy: control API", "version": "1"},
        "security": [{"controlToken": []}],
        "paths": {
            "/v1/sessions": {
                "post": {
                    "operationId": "openSession",
                    "summary": "Open a session; the only time its key is shown.",
                    "description": _BASE_URLS,
                    "requestBody": {"required": False, "content": _content(_ref(OpenSession))},
                    "responses": _responses(_ref(OpenedSession), "400", "401", "409"),
                }
            },
            "/v1/sessions/{session_id}/seal": {
                "post": {
                    "operationId": "sealSession",
                    "summary": "Refuse further calls, cancel those in flight, wait until all are recorded. Idempotent.",
                    "parameters": [_SESSION],
                    "responses": _responses(_ref(SealedSession), "401", "404"),
                }
            },
            "/v1/sessions/{session_id}/calls": {
                "get": {
                    "operationId": "sessionCalls",
                    "summary": "Recorded calls in order of arrival, paged.",
                    "parameters": [_SESSION, *query],
                    "responses": _responses({"anyOf": [_ref(CallPage), _ref(RecordPage)]}, "400", "401", "404"),
                }
            },
            "/v1/sessions/{session_id}/samples": {
                "get": {
                    "operationId": "sessionSamples",
                    "summary": "Training rows made of the recorded calls, with the account of every sampled token.",
                    "parameters": [_SESSION],
                    "responses": _responses(_ref(SamplesView), "400", "401", "404", "500"),
                }
            },
            "/v1/images/{sha256}": {
                "get": {
                    "operationId": "image",
                    "summary": "The bytes of an image that a call's prompt names.",
                    "parameters": [{**_SESSION, "name": "sha256"}],
                    "responses": {
                        **_responses({}, "401", "404"),
                        "200": {"description": "Done.", "content": {"application/octet-stream": {}}},
                    },
                }
            },
            "/healthz": {
                "get": {
                    "operationId": "health",
                    "summary": "Whether the proxy serves, and what.",
                    "security": [],
                    "responses": _responses(_ref(Health)),
                }
            },
            "/openapi.json": {
                "get": {
                    "operationId": "openapi",
                    "summary": "This document.",
                    "security": [],
                    "responses": _responses({"type": "object"}),
                }
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"controlToken": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(schema: dict[str, Any], *refusals: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": _content(schema)}}
    for status in refusals:
        answers[status] = {"description": "Refused.", "content": _content(_ref(ErrorView))}
    return answers
