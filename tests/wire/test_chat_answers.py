"""Chat answers: transcripts written by hand, reproduced to the byte and read back however they are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.errors import ContextOverflow, WireError
from openforgerl.types import Conversation, FinishReason, Message, MessageDelta, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Answer, ChatDialect, Head, MessageBuilder, Request, ShownToken, SseReader, TokenWriter

CHAT = ChatDialect()
STREAMS = Path(__file__).parent / "golden" / "streams"

DELTAS = [
    MessageDelta(kind="reasoning", text="Löschen?"),
    MessageDelta(kind="text", text="안녕 "),
    MessageDelta(kind="text", text="😀\n"),
    MessageDelta(kind="call", text="bash", call_index=0, call_id="call0"),
    MessageDelta(kind="arguments", text='{"command": ', call_index=0),
    MessageDelta(kind="arguments", text='"ls"}', call_index=0),
    MessageDelta(kind="call", text="read", call_index=1, call_id="call1"),
    MessageDelta(kind="arguments", text="oops", call_index=1),
]
MESSAGE = Message(
    role=Role.ASSISTANT,
    parts=(Reasoning("Löschen?"), Text("안녕 😀\n")),
    tool_calls=(
        ToolCall(id="call0", name="bash", arguments='{"command": "ls"}'),
        ToolCall(id="call1", name="read", arguments="oops"),
    ),
)


def request(**fields: Any) -> Request:
    return Request(dialect="chat", model="policy", conversation=Conversation(messages=()), **fields)


def head(**fields: Any) -> Head:
    return Head(call_id="c1", model="policy", created=1_700_000_000, **fields)


def answer(message: Message = MESSAGE, finish: FinishReason = FinishReason.STOP) -> Answer:
    return Answer(message=message, finish=finish, prompt_tokens=12, completion_tokens=30)


def say(text: str) -> list[MessageDelta]:
    return [MessageDelta(kind="text", text=text)]


def test_a_thought_text_and_two_calls_with_usage() -> None:
    writer = CHAT.writer(head(), request(include_usage=True))
    sent = writer.open(7) + b"".join(writer.write([delta]) for delta in DELTAS) + writer.close(answer())
    assert sent == (STREAMS / "thought-text-and-two-calls.sse").read_bytes()


def test_an_answer_cut_by_length_without_usage() -> None:
    writer = CHAT.writer(head(), request())
    message = Message(role=Role.ASSISTANT, parts=(Text("cut sho"),))
    sent = writer.open(7) + writer.write(say("cut sho")) + writer.close(answer(message, FinishReason.LENGTH))
    assert sent == (STREAMS / "length-without-usage.sse").read_bytes()


def test_tokens_go_out_with_the_piece_that_they_made() -> None:
    """안 is two tokens here, and what ends a thought makes no piece: both go out with the next chunk there is."""
    writer = CHAT.writer(head(), request(logprobs=True))
    tokens = [ShownToken(data=data, logprob=at / -4) for at, data in enumerate((b"\xec\x95", b"\x88", b"!", b"\n"))]
    sent = [writer.open(7)]
    assert isinstance(writer, TokenWriter)
    for token, text in zip(tokens, ("", "안", "!", ""), strict=True):
        writer.show([token])
        sent.append(writer.write(say(text) if text else []))
    message = Message(role=Role.ASSISTANT, parts=(Text("안!"),))
    whole = msgspec.structs.replace(answer(message), tokens=tuple(tokens))
    sent.append(writer.close(whole))
    chunks = [json.loads(event.data) for event in SseReader().feed(b"".join(sent)) if event.data != "[DONE]"]
    assert [len((chunk["choices"][0]["logprobs"] or {"content": []})["content"]) for chunk in chunks] == [0, 2, 1, 1]
    shown = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    body = CHAT.whole(head(), request(logprobs=True), whole)
    assert body["choices"][0]["logprobs"] == {"content": shown, "refusal": None}
    assert bytes(byte for entry in shown for byte in entry["bytes"]).decode() == "안!\n"
    assert shown[2] == {"token": "!", "logprob": -0.5, "bytes": [33], "top_logprobs": []}


def test_a_broken_stream_has_an_error_and_no_end_mark() -> None:
    writer = CHAT.writer(head(), request())
    error = WireError(500, "engine_error", "the engine is gone")
    sent = writer.open(7) + writer.write(say("half")) + writer.keep_alive() + writer.fail(error)
    assert sent == (STREAMS / "broken-by-the-engine.sse").read_bytes()
    assert b"[DONE]" not in sent


@pytest.mark.parametrize("path", sorted(STREAMS.glob("*.sse")), ids=lambda path: path.stem)
def test_a_transcript_reads_the_same_when_cut_at_every_byte(path: Path) -> None:
    data = path.read_bytes()
    whole = SseReader().feed(data)
    # Read independently of our reader: the transcripts hold one line per event.
    assert [event.data for event in whole] == [
        line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: ")
    ]
    for cut in range(len(data) + 1):
        reader = SseReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole
    reader = SseReader()
    assert [event for byte in data for event in reader.feed(bytes([byte]))] == whole


def test_a_client_puts_the_stream_together_to_the_whole_answer() -> None:
    writer = CHAT.writer(head(), request())
    sent = writer.open(7) + writer.write(DELTAS) + writer.close(answer())
    text, thought, arguments = "", "", {0: "", 1: ""}
    events = SseReader().feed(sent)
    assert events[-1].data == "[DONE]"
    for event in events[:-1]:
        delta = json.loads(event.data)["choices"][0]["delta"]
        text += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
    message = CHAT.whole(head(), request(), answer())["choices"][0]["message"]
    assert (text, thought) == (message["content"], message["reasoning_content"])
    assert list(arguments.values()) == [call["function"]["arguments"] for call in message["tool_calls"]]


def test_a_whole_answer() -> None:
    assert CHAT.whole(head(), request(), answer()) == {
        "id": "chatcmpl-c1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "안녕 😀\n",
                    "reasoning_content": "Löschen?",
                    "tool_calls": [
                        {
                            "id": "call0",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                        },
                        {"id": "call1", "type": "function", "function": {"name": "read", "arguments": "oops"}},
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42},
    }


@pytest.mark.parametrize(
    ("message", "finish", "word", "content"),
    [
        (Message(role=Role.ASSISTANT), FinishReason.STOP, "stop", ""),
        (Message(role=Role.ASSISTANT, parts=(Text("a"),)), FinishReason.STOP_STRING, "stop", "a"),
        (Message(role=Role.ASSISTANT, tool_calls=MESSAGE.tool_calls), FinishReason.STOP, "tool_calls", None),
        (Message(role=Role.ASSISTANT, tool_calls=MESSAGE.tool_calls), FinishReason.LENGTH, "length", None),
    ],
)
def test_finish_reasons_and_empty_content(
    message: Message, finish: FinishReason, word: str, content: str | None
) -> None:
    (choice,) = CHAT.whole(head(), request(), answer(message, finish))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (word, content)
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WireError(400, "invalid_request", "no", param="messages[0]"), "invalid_request_error"),
        (WireError(401, "invalid_api_key", "no"), "authentication_error"),
        (WireError(403, "session_closed", "no"), "permission_error"),
        (WireError(404, "not_found", "no"), "invalid_request_error"),
        (WireError(429, "rate_limit_exceeded", "no"), "rate_limit_error"),
        (WireError(503, "engine_error", "no"), "server_error"),
    ],
)
def test_errors_have_openais_shape(error: WireError, kind: str) -> None:
    assert CHAT.error(error) == {
        "error": {"message": "no", "type": kind, "param": error.param, "code": error.code},
    }


def test_context_overflow_is_what_harnesses_look_for() -> None:
    detail = CHAT.error(ContextOverflow(5000, 4096))["error"]
    assert (detail["code"], detail["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 4096 tokens" in detail["message"]


def test_the_list_of_models() -> None:
    assert [model["id"] for model in CHAT.models(["a", "b"])["data"]] == ["a", "b"]


def test_the_pieces_make_the_message() -> None:
    builder = MessageBuilder()
    builder.add(DELTAS)
    assert builder.message() == MESSAGE
    builder.expect(MESSAGE)
