"""Gemini answers: transcripts written by hand, reproduced to the byte, and bodies as the API documents them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import ContextOverflow, WireError
from openforgerl.types import Conversation, FinishReason, Message, MessageDelta, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Answer, Head, Request, SseReader

from .gemini_clients import GEMINI, javascript

STREAMS = Path(__file__).parent / "golden" / "gemini" / "streams"
HEAD = Head(call_id="c1", model="policy", created=1_700_000_000, handle="h1")
DELTAS = [
    MessageDelta(kind="reasoning", text="Löschen?"),
    MessageDelta(kind="text", text="안녕 "),
    MessageDelta(kind="text", text="😀\n\u2028"),
    MessageDelta(kind="call", text="bash", call_index=0, call_id="call0"),
    MessageDelta(kind="arguments", text='{"command": ', call_index=0),
    MessageDelta(kind="arguments", text='"ls"}', call_index=0),
    MessageDelta(kind="call", text="read", call_index=1, call_id="call1"),
    MessageDelta(kind="arguments", text="oops", call_index=1),
    MessageDelta(kind="call", text="list", call_index=2, call_id="call2"),
]
MESSAGE = Message(
    role=Role.ASSISTANT,
    parts=(Reasoning("Löschen?"), Text("안녕 😀\n\u2028")),
    tool_calls=(
        ToolCall(id="call0", name="bash", arguments='{"command": "ls"}'),
        ToolCall(id="call1", name="read", arguments="oops"),
        ToolCall(id="call2", name="list", arguments=""),
    ),
)


def request(*, thoughts: bool = False) -> Request:
    raw = {"generation_config": {"thinking_config": {"include_thoughts": thoughts}}}
    return Request(dialect="gemini", model="policy", conversation=Conversation(messages=()), raw=raw)


def answer(message: Message = MESSAGE, finish: FinishReason = FinishReason.STOP) -> Answer:
    return Answer(message=message, finish=finish, prompt_tokens=12, completion_tokens=30)


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Text(text),) if text else ())


def test_a_thought_text_and_three_calls() -> None:
    writer = GEMINI.writer(HEAD, request(thoughts=True))
    sent = writer.open(12) + b"".join(writer.write([delta]) for delta in DELTAS) + writer.close(answer())
    assert sent == (STREAMS / "thought-text-and-three-calls.sse").read_bytes()


def test_an_answer_cut_by_length() -> None:
    writer = GEMINI.writer(HEAD, request())
    text = writer.write([MessageDelta(kind="text", text="cut sho")])
    sent = writer.open(12) + text + writer.close(answer(said("cut sho"), FinishReason.LENGTH))
    assert sent == (STREAMS / "length.sse").read_bytes()


def test_a_broken_stream_ends_in_a_bare_error() -> None:
    writer = GEMINI.writer(HEAD, request())
    sent = writer.write([MessageDelta(kind="text", text="half"), DELTAS[3]]) + writer.keep_alive()
    sent += writer.fail(WireError(500, "engine_error", "the engine is gone"))
    assert sent == (STREAMS / "broken-by-the-engine.sse").read_bytes()
    assert b"functionCall" not in sent  # the open call was not whole
    assert b"finishReason" not in sent
    with pytest.raises(ValueError, match="Incomplete JSON segment"):  # read at once, and ended in order
        javascript(sent)


@pytest.mark.parametrize("path", sorted(STREAMS.glob("*.sse")), ids=lambda path: path.stem)
def test_a_transcript_reads_the_same_when_cut_at_every_byte(path: Path) -> None:
    data = path.read_bytes()
    whole = SseReader().feed(data)
    assert [event.data for event in whole] == [
        line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: ")
    ]
    for cut in range(len(data) + 1):
        reader = SseReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole


def test_a_call_is_sent_once_it_is_known_to_be_whole() -> None:
    writer = GEMINI.writer(HEAD, request())
    written = [writer.write([delta]) for delta in DELTAS]
    assert [piece.count(b"functionCall") for piece in written] == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert written[0] == b""  # nobody asked for thoughts
    assert writer.close(answer()).count(b"functionCall") == 1


def test_a_whole_answer() -> None:
    (first, *_, last) = (STREAMS / "thought-text-and-three-calls.sse").read_text("utf-8").split("\n\n")[:-1]
    body = GEMINI.whole(HEAD, request(thoughts=True), answer())
    (candidate,) = body.pop("candidates")
    thought, text, *calls = candidate["content"]["parts"]
    assert thought == json.loads(first.removeprefix("data: "))["candidates"][0]["content"]["parts"][0]
    assert (text["text"], text["thoughtSignature"]) == ("안녕 😀\n\u2028", thought["thoughtSignature"])
    assert [part["functionCall"] for part in calls] == [
        {"id": "call0", "name": "bash", "args": {"command": "ls"}},
        {"id": "call1", "name": "read", "args": {"unparsed_arguments": "oops"}},
        {"id": "call2", "name": "list", "args": {}},
    ]
    assert (candidate["finishReason"], candidate["index"], candidate["content"]["role"]) == ("STOP", 0, "model")
    assert body == {
        "usageMetadata": {"promptTokenCount": 12, "candidatesTokenCount": 30, "totalTokenCount": 42},
        "modelVersion": "policy",
        "responseId": "c1",
    }
    assert json.loads(last.removeprefix("data: "))["usageMetadata"] == body["usageMetadata"]


@pytest.mark.parametrize(
    ("message", "finish", "word", "parts"),
    [
        (said(""), FinishReason.STOP, "STOP", [{"text": ""}]),
        (said("a"), FinishReason.STOP_STRING, "STOP", [{"text": "a"}]),
        (said("a"), FinishReason.LENGTH, "MAX_TOKENS", [{"text": "a"}]),
    ],
)
def test_finish_reasons_and_answers_without_a_thought(
    message: Message, finish: FinishReason, word: str, parts: list[Any]
) -> None:
    (candidate,) = GEMINI.whole(HEAD, request(thoughts=True), answer(message, finish))["candidates"]
    assert (candidate["finishReason"], candidate["content"]["parts"]) == (word, parts)


@pytest.mark.parametrize(
    ("status", "code", "word"),
    [
        (400, "invalid_request", "INVALID_ARGUMENT"),
        (401, "invalid_api_key", "UNAUTHENTICATED"),
        (403, "session_closed", "PERMISSION_DENIED"),
        (404, "not_found", "NOT_FOUND"),
        (405, "method_not_allowed", "UNIMPLEMENTED"),
        (408, "request_timeout", "DEADLINE_EXCEEDED"),
        (413, "request_too_large", "INVALID_ARGUMENT"),
        (429, "rate_limit_exceeded", "RESOURCE_EXHAUSTED"),
        (500, "internal_error", "INTERNAL"),
        (502, "engine_error", "INTERNAL"),
        (503, "shutting_down", "UNAVAILABLE"),
    ],
)
def test_errors_have_googles_shape(status: int, code: str, word: str) -> None:
    error = WireError(status, code, "no")
    assert GEMINI.status(error) == status
    assert GEMINI.error(error) == {
        "error": {
            "code": status,
            "message": "no",
            "status": word,
            "details": [
                {
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": code.upper(),
                    "domain": "openforgerl",
                }
            ],
        }
    }


def test_an_error_names_the_field_and_the_wait() -> None:
    error = WireError(429, "rate_limit_exceeded", "full", param="contents[0]", retry_after=2.5)
    _, field, wait = GEMINI.error(error)["error"]["details"]
    assert field == {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": "contents[0]", "description": "full"}],
    }
    assert wait == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2.500s"}


def test_context_overflow_is_worded_as_googles() -> None:
    detail = GEMINI.error(ContextOverflow(5000, 4096))["error"]
    assert (detail["code"], detail["status"]) == (400, "INVALID_ARGUMENT")
    assert detail["message"] == "The input token count (5000) exceeds the maximum number of tokens allowed (4096)."


def test_counts_and_models() -> None:
    assert GEMINI.counted(7) == {"totalTokens": 7}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    assert GEMINI.models(["a", "b"]) == {
        "models": [
            {"name": "models/a", "displayName": "a", "supportedGenerationMethods": methods},
            {"name": "models/b", "displayName": "b", "supportedGenerationMethods": methods},
        ]
    }
