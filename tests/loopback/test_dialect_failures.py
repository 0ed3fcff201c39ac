"""What goes wrong, told to every dialect's client in its own shape; and whose key opens which door."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.rendering import ChatRenderer
from openforgerl.types import CallStatus, Limits, ThreadRole

from .house import GatedEngine, Reply, ask, house, scripted
from .speakers import PIXEL, SPEAKERS, Speaker, Talker

GEMINI = SPEAKERS[3]
EVERY = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda speaker: speaker.name)
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

KINDS: dict[str, dict[int, str]] = {
    "chat": {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "invalid_request_error",
        405: "invalid_request_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
    },
    "messages": {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    },
    "gemini": {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        405: "UNIMPLEMENTED",
        413: "INVALID_ARGUMENT",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    },
}
"""Each API's own word for a status, from its documentation."""


def check(speaker: Speaker, reply: Reply, status: int, code: str) -> None:
    """The dialect's error object with its word for the status and our code."""
    assert (reply.status, speaker.code(reply.body)) == (status, code), reply.body
    error = reply.body["error"]
    kinds = KINDS.get(speaker.name, KINDS["chat"])
    if speaker.name == "gemini":
        assert (set(reply.body), error["code"], error["status"]) == ({"error"}, status, kinds[status])
    elif speaker.name == "messages":
        assert (reply.body["type"], error["type"]) == ("error", kinds[status])
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
    else:
        assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, kinds[status])
    assert error["message"]
    assert len(reply.headers["x-request-id"]) == 32


@EVERY
async def test_refusals(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    engine = scripted(renderer, {"text": "a", "times": 0}, context_length=600)
    async with house(tmp_path, renderer, engine, body_limit_mb=0.05) as home:
        talker = await Talker.open(home, speaker, limits=Limits(calls=2))
        path, hi = speaker.path(stream=False), speaker.user("Hi.")
        body = speaker.body(hi, stream=False, tools=False)
        check(speaker, await talker.post(path, {}), 400, "invalid_request")
        check(speaker, await talker.post(path, b"{"), 400, "invalid_request")
        check(
            speaker,
            await talker.post(path, body, **{speaker.key_header: speaker.key_prefix + "x"}),
            401,
            "invalid_api_key",
        )
        nowhere = {
            "chat": "/chat/x",
            "responses": "/responses/x/y",
            "messages": "/v1/messages/x",
            "gemini": "/v1beta/x",
        }
        check(speaker, await talker.post(nowhere[speaker.name], body), 404, "not_found")
        check(speaker, await talker.post(path, b" " * 60_000), 413, "request_too_large")
        async with home.http.delete(talker.base + path, headers=talker.headers) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            check(speaker, Reply(response.status, headers, await response.json()), 405, "method_not_allowed")
            assert "POST" in headers["allow"]
        nobody = talker.base.replace("/s/s1", "/s/nobody")
        async with home.http.post(nobody + path, json=body, headers=talker.headers) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            check(speaker, Reply(response.status, headers, await response.json()), 404, "session_not_found")
        over = await talker.ask(speaker.user("word " * 700))
        check(speaker, over, 400, "context_length_exceeded")
        assert any(words in over.body["error"]["message"] for words in ("maximum", "too long"))
        assert (await talker.ask(hi)).status == 200
        check(speaker, await talker.ask(hi), 403, "session_limit")
        await home.sessions.seal("s1")
        check(speaker, await talker.ask(hi), 403, "session_closed")
        calls = await home.calls()
    assert [call.status for call in calls] == [CallStatus.ERROR, CallStatus.COMPLETE]


@EVERY
@BOTH
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        ({"status": 500}, 500, "engine_error", None),
        ({"status": 503}, 503, "engine_error", None),
        ({"status": 429, "retry_after": 2.5}, 429, "rate_limit_exceeded", "3"),
        ({"status": 429}, 429, "rate_limit_exceeded", "1"),
    ],
    ids=["500", "503", "429 with a time", "429"],
)
async def test_an_engine_that_fails_before_the_first_token(
    tmp_path: Path,
    renderer: ChatRenderer,
    speaker: Speaker,
    stream: bool,
    error: dict[str, Any],
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"error": error}, {"text": "ok"})) as home:
        talker = await Talker.open(home, speaker)
        reply = await talker.ask(speaker.user("Hi."), stream=stream)
        check(speaker, reply, 529 if (speaker.name, status) == ("messages", 503) else status, code)
        assert reply.headers.get("retry-after") == retry_after
        assert (await talker.say(speaker.user("Hi."), stream=stream)).text == "ok"


@EVERY
async def test_an_engine_that_fails_mid_answer(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    engine = scripted(renderer, {"text": "one two three four five", "cut_after_tokens": 6, "times": 0})
    async with house(tmp_path, renderer, engine) as home:
        talker = await Talker.open(home, speaker)
        said = await talker.say(speaker.user("Hi."), stream=True)
        whole = await talker.ask(speaker.user("Hi."))
        first, second = await home.calls()
    assert said.text and "one two three four five".startswith(said.text)
    # An error, no end mark, and the connection is cut: nobody takes it for an answer. (Google's clients fail at what
    # the error leaves in their buffer.)
    assert (said.done, said.cut) == (False, speaker.name != "gemini")
    assert said.error is not None
    assert "6 tokens" in json.dumps(said.error)
    check(speaker, whole, 500, "engine_error")
    for call in (first, second):
        assert (call.status, len(call.sampled_ids)) == (CallStatus.ERROR, 6)


@EVERY
async def test_signs_of_life_while_the_model_is_silent(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker
) -> None:
    """Before the first token, and while it thinks what this client is not shown; the stream stays readable."""
    engine = GatedEngine(renderer.encode("<think>\nHm.\n</think>\n\nDone.<|im_end|>"))
    async with house(tmp_path, renderer, engine, keep_alive_s=0.02) as home:
        talker = await Talker.open(home, speaker)
        hidden = {"thinking": {"type": "adaptive", "display": "omitted"}} if speaker.name == "messages" else {}
        pieces = talker.pieces(speaker.user("Hi."), **hidden)
        raw = b""
        async with asyncio.timeout(10):
            for _ in range(3):
                raw += await anext(pieces)
                assert b"data: " not in raw
            engine.allow(3)
            beats = (b": keep-alive\n\n", b'"type":"ping"', b'"type":"keepalive"', b"\n\n\n")
            seen = len(raw)
            while engine.sampled < 3 or not any(beat in raw[seen:] for beat in beats):
                raw += await anext(pieces)
            engine.allow(100)
            async for piece in pieces:
                raw += piece
    said = speaker.streamed(raw)
    assert (said.text, said.done, said.error) == ("Done.", True, None)


@EVERY
@BOTH
async def test_images_are_refused_by_a_model_that_takes_none(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker, stream: bool
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "ok"})) as home:
        talker = await Talker.open(home, speaker)
        reply = await talker.ask(speaker.picture(), stream=stream)
        check(speaker, reply, 400, "template_error")
        assert "this model takes no images" in reply.body["error"]["message"]
        assert PIXEL not in json.dumps(reply.body)
        assert await home.calls() == []
        assert (await talker.say(speaker.user("Hi."))).text == "ok"


@EVERY
async def test_a_call_that_cannot_be_forced_names_the_field(
    tmp_path: Path, renderer: ChatRenderer, speaker: Speaker
) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "ok"})) as home:
        talker = await Talker.open(home, speaker)
        reply = await talker.ask(speaker.user("Hi."), tools=True, **speaker.forced("rm"))
        assert reply.status == 400
        assert "tool" in json.dumps(reply.body).lower()
        assert await home.calls() == []


@EVERY
async def test_a_key_may_stand_in_any_clients_place(tmp_path: Path, renderer: ChatRenderer, speaker: Speaker) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        talker = await Talker.open(home, speaker)
        other = await home.client("s2")
        key, theirs = talker.headers[speaker.key_header].removeprefix("Bearer "), other.session.key
        path = speaker.path(stream=False)
        joint = "&" if "?" in path else "?"
        body = speaker.body(speaker.user("Hi."), stream=False, tools=False)
        places: list[tuple[dict[str, str], str, int]] = [
            ({"Authorization": f"Bearer {key}"}, "", 200),
            ({"X-Api-Key": key}, "", 200),
            ({"x-goog-api-key": key}, "", 200),
            ({}, f"{joint}key={key}", 200),
            ({"Authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}, f"{joint}key={key}", 200),
            ({"Authorization": f"Bearer {key}", "x-api-key": theirs}, "", 401),
            ({"x-api-key": key}, f"{joint}key={theirs}", 401),
            ({"x-api-key": key}, f"{joint}key=", 401),
            ({}, f"{joint}key={key}&key={key}", 401),
            ({"Authorization": f"Basic {key}", "x-api-key": key}, "", 401),
            ({}, "", 401),
        ]
        for headers, query, status in places:
            talker.headers = headers
            assert (await talker.post(path + query, body)).status == status, (list(headers), query.partition("=")[0])
        calls = await home.calls()
    assert len(calls) == 5
    assert key not in repr(calls)
    assert {call.request_headers[":path"] for call in calls} == {("/v1" if talker.base.endswith("/v1") else "") + path}


async def test_models_in_the_shape_of_whoever_asks(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, model_name="tiny")) as home:
        key = (client := await home.client()).session.key
        base = client.session.base_urls["gemini"]

        async def get(path: str, **headers: str) -> Any:
            async with home.http.get(
                base + path, headers={name.replace("_", "-"): v for name, v in headers.items()}
            ) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        openai = await get("/v1/models", authorization=f"Bearer {key}")
        assert (openai["object"], openai["data"][0]["id"]) == ("list", "tiny")
        assert (await get("/v1/models/a:b/c", authorization=f"Bearer {key}"))["id"] == "a:b/c"
        anthropic = await get("/v1/models?limit=1000", x_api_key=key, anthropic_version="2023-06-01")
        assert (anthropic["data"][0]["type"], anthropic["has_more"]) == ("model", False)
        assert (await get("/v1/models/x", x_api_key=key, anthropic_version="2023-06-01"))["display_name"] == "x"
        google = await get("/v1beta/models", x_goog_api_key=key)
        assert google["models"][0]["name"] == "models/tiny"
        assert (await get("/v1beta/models/x", x_goog_api_key=key))["name"] == "models/x"


async def test_probes_need_no_key_and_tell_nothing(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        base = (await home.client()).session.base_urls["messages"]
        answers: set[tuple[int, bytes]] = set()
        for url in (base, base.replace("/s1", "/nobody")):
            for method, path in (("HEAD", ""), ("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")):
                async with home.http.request(method, url + path) as response:
                    answers.add((response.status, await response.read()))
        assert answers == {(200, b""), (200, b'{"status":"ok"}')}
        async with home.http.get(base + "/") as response:
            assert response.status == 405


async def test_a_gemini_stream_that_is_not_sse(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        talker = await Talker.open(home, GEMINI)
        body = GEMINI.body(GEMINI.user("Hi."), stream=True, tools=False)
        for query in ("", "?alt=json", "?alt="):
            reply = await talker.post(f"/v1beta/models/m:streamGenerateContent{query}", body)
            check(GEMINI, reply, 400, "unsupported_field")
            assert "alt=sse" in reply.body["error"]["message"]


async def test_every_dialect_of_one_session(tmp_path: Path, renderer: ChatRenderer) -> None:
    """One after the other on one session: the same conversation goes on, whoever says it."""
    async with house(tmp_path, renderer, scripted(renderer, {"text": "a", "times": 0})) as home:
        client = await home.client()
        for speaker in SPEAKERS:
            talker = Talker(home.http, client.session, speaker)
            assert (await talker.say(speaker.user("Hi."))).text == "a"
        calls = await home.calls()
    assert [call.dialect for call in calls] == ["chat", "responses", "messages", "gemini"]
    assert len({call.prompt.ids for call in calls}) == 1
    assert {call.role for call in calls} == {ThreadRole.MAIN}


async def test_log_probabilities_on_request(tmp_path: Path, renderer: ChatRenderer) -> None:
    ids = renderer.encode("안녕!<|im_end|>")
    async with house(tmp_path, renderer, GatedEngine(ids, free=True)) as home:
        client = await home.client()
        whole = (await client.post(ask(logprobs=True))).body["choices"][0]["logprobs"]["content"]
        got = await client.stream(ask(logprobs=True, top_logprobs=0))
        plain = (await client.post(ask())).body["choices"][0]
    streamed = [
        entry
        for chunk in got.chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole
    assert len(whole) == len(ids) - 1  # not the end of the turn
    assert {entry["logprob"] for entry in whole} == {-0.5}
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == "안녕!"
    assert plain["logprobs"] is None
    async with house(tmp_path / "scripted", renderer, scripted(renderer, {"text": "a"})) as home:
        reply = await (await home.client()).post(ask(logprobs=True))
        assert (reply.status, reply.body["choices"][0]["logprobs"]) == (200, None)


async def test_streamed_log_probabilities_come_with_the_text_they_made(tmp_path: Path, renderer: ChatRenderer) -> None:
    ids = renderer.encode("QX 안녕! so<|im_end|>")
    async with house(tmp_path, renderer, GatedEngine(ids, free=True)) as home:
        got = await (await home.client()).stream(ask(logprobs=True))
    choices = [chunk["choices"][0] for chunk in got.chunks]
    assert (choices[0]["delta"]["role"], choices[0]["logprobs"]) == ("assistant", None)
    told = [
        bytes(byte for entry in (choice["logprobs"] or {"content": []})["content"] for byte in entry["bytes"]).decode()
        for choice in choices
    ]
    assert told == [choice["delta"].get("content", "") for choice in choices]
    assert len([text for text in told if text]) > 2  # in pieces, each with its own


async def test_a_bug_behind_the_control_port_is_told_as_json(
    tmp_path: Path, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path, renderer, scripted(renderer)) as home:
        await home.client()

        async def broken(*given: Any, **fields: Any) -> Any:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(home.store, "calls", broken)
        reply = await home.control("GET", "/v1/sessions/s1/calls")
    assert (reply.status, reply.body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(reply.body)
