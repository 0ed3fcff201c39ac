"""Messages answers: transcripts written by hand, reproduced to the byte and read back however they are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.conversation import same_message
from openforgerl.errors import ContextOverflow, ExactnessError, WireError
from openforgerl.types import Conversation, FinishReason, Message, MessageDelta, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Answer, Head, MessagesDialect, Request

from .messages_client import Remembered, assembled, echo, events_of

DIALECT = MessagesDialect()
STREAMS = Path(__file__).parent / "golden" / "messages" / "streams"

DELTAS = [
    MessageDelta(kind="reasoning", text="Lösch"),
    MessageDelta(kind="reasoning", text="en?"),
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


def request(**raw: Any) -> Request:
    return Request(dialect="messages", model="policy", conversation=Conversation(messages=()), raw=raw)


def head() -> Head:
    return Head(call_id="c1", model="policy", created=1_700_000_000, handle="h1")


def answer(
    message: Message = MESSAGE, finish: FinishReason = FinishReason.STOP, stop_string: str | None = None
) -> Answer:
    return Answer(message=message, finish=finish, prompt_tokens=12, completion_tokens=30, stop_string=stop_string)


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Text(text),))


def called(*arguments: str) -> Message:
    calls = (ToolCall(id=f"call{at}", name="f", arguments=text) for at, text in enumerate(arguments))
    return Message(role=Role.ASSISTANT, tool_calls=tuple(calls))


def streamed(deltas: list[MessageDelta], end: Answer, **raw: Any) -> bytes:
    writer = DIALECT.writer(head(), request(**raw))
    return writer.open(12) + b"".join(writer.write([delta]) for delta in deltas) + writer.close(end)


def test_a_thought_text_and_two_calls() -> None:
    sent = streamed(DELTAS, answer())
    assert sent == (STREAMS / "thought-text-and-two-calls.sse").read_bytes()
    writer = DIALECT.writer(head(), request())
    assert writer.open(12) + writer.write(DELTAS) + writer.close(answer()) == sent


def test_an_omitted_thought_is_only_signed() -> None:
    deltas = [*DELTAS[:2], MessageDelta(kind="text", text="ok")]
    message = Message(role=Role.ASSISTANT, parts=(Reasoning("Löschen?"), Text("ok")))
    sent = streamed(deltas, answer(message), thinking={"type": "adaptive", "display": "omitted"})
    assert sent == (STREAMS / "omitted-thought.sse").read_bytes()


def test_an_answer_cut_by_length_in_a_call() -> None:
    deltas = [
        MessageDelta(kind="call", text="bash", call_index=0, call_id="call0"),
        MessageDelta(kind="arguments", text='{"command": "l', call_index=0),
    ]
    message = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call0", name="bash", arguments='{"command": "l'),))
    sent = streamed(deltas, answer(message, FinishReason.LENGTH))
    assert sent == (STREAMS / "length-in-a-call.sse").read_bytes()


def test_a_broken_stream_has_an_error_and_no_end() -> None:
    writer = DIALECT.writer(head(), request())
    early = writer.keep_alive()
    sent = writer.open(12) + writer.write([MessageDelta(kind="text", text="half")])
    sent += writer.keep_alive() + writer.fail(WireError(500, "engine_error", "the engine is gone"))
    assert early + sent == (STREAMS / "silent-then-broken.sse").read_bytes()
    assert b"message_stop" not in sent


@pytest.mark.parametrize("path", sorted(STREAMS.glob("*.sse")), ids=lambda path: path.stem)
def test_a_transcript_reads_the_same_when_cut_at_every_byte(path: Path) -> None:
    data = path.read_bytes()
    whole = events_of([data])
    # Read independently of our reader: the transcripts hold one data line per event.
    lines = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    assert whole == [event for event in lines if event["type"] != "ping"]
    for cut in range(len(data) + 1):
        assert events_of([data[:cut], data[cut:]]) == whole
    assert events_of(bytes([byte]) for byte in data) == whole


def test_the_stream_and_the_whole_answer_are_the_same_message() -> None:
    end = answer(DIALECT.sent(MESSAGE, request()))
    assert assembled(events_of([streamed(DELTAS, end)])) == DIALECT.whole(head(), request(), end)


def test_a_whole_answer() -> None:
    assert DIALECT.whole(head(), request(), answer(DIALECT.sent(MESSAGE, request()))) == {
        "id": "msg_c1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Löschen?", "signature": "h1"},
            {"type": "text", "text": "안녕 😀\n"},
            {"type": "tool_use", "id": "call0", "name": "bash", "input": {"command": "ls"}},
            {
                "type": "tool_use",
                "id": "call1",
                "name": "read",
                "input": {"__unparsedToolInput": {"raw": "oops", "len": 4}},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 12,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 30,
        },
    }


def test_a_whole_answer_with_an_omitted_thought() -> None:
    body = DIALECT.whole(head(), request(thinking={"type": "adaptive", "display": "omitted"}), answer())
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": "h1"}


@pytest.mark.parametrize(
    ("message", "finish", "hit", "reason"),
    [
        (said("a"), FinishReason.STOP, None, "end_turn"),
        (Message(role=Role.ASSISTANT), FinishReason.STOP, None, "end_turn"),
        (said("a"), FinishReason.STOP_STRING, "END", "stop_sequence"),
        (called("{}"), FinishReason.STOP, None, "tool_use"),
        (called("{}"), FinishReason.LENGTH, None, "max_tokens"),
    ],
)
def test_stop_reasons(message: Message, finish: FinishReason, hit: str | None, reason: str) -> None:
    end = answer(message, finish, hit)
    body = DIALECT.whole(head(), request(), end)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, hit)
    delta = assembled(events_of([streamed([], end)]))
    assert (delta["stop_reason"], delta["stop_sequence"], delta["usage"]["output_tokens"]) == (reason, hit, 30)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        (' {"a": 1}\n', {"a": 1}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (" null ", {}),
        ("[1]", {"__unparsedToolInput": {"raw": "[1]", "len": 3}}),
        ('"{}"', {"__unparsedToolInput": {"raw": '"{}"', "len": 4}}),
        ("nul", {"__unparsedToolInput": {"raw": "nul", "len": 3}}),
        ('{"command": "echo oops', {"__unparsedToolInput": {"raw": '{"command": "echo oops', "len": 22}}),
        ('{"a": NaN}', {"__unparsedToolInput": {"raw": '{"a": NaN}', "len": 10}}),
        ("😀", {"__unparsedToolInput": {"raw": "😀", "len": 2}}),
    ],
)
def test_arguments_that_are_no_object_by_the_rule(arguments: str, given: dict[str, Any]) -> None:
    """Streamed one character at a time and whole: the client holds the same, and its echo is what we recorded."""
    message = called(arguments)
    sent = DIALECT.sent(message, request())
    deltas = [MessageDelta(kind="call", text="f", call_index=0, call_id="call0")]
    deltas += [MessageDelta(kind="arguments", text=character, call_index=0) for character in arguments]
    stream = assembled(events_of([streamed(deltas, answer(sent))]))
    whole = DIALECT.whole(head(), request(), answer(sent))
    assert stream["content"][0]["input"] == whole["content"][0]["input"] == given
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}, echo(stream)]}).encode()
    assert same_message(DIALECT.parse(body).conversation.messages[1], sent)
    assert (sent is message) == ("a" in given)  # an object as it is


def test_the_stream_carries_what_the_policy_wrote() -> None:
    """However wrong: the client decides what to make of it."""
    deltas = [MessageDelta(kind="call", text="f", call_index=0, call_id="call0")]
    deltas += [MessageDelta(kind="arguments", text=piece, call_index=0) for piece in ("n", "ul", ' {"a', "\n")]
    events = events_of([streamed(deltas, answer(called('nul {"a\n')))])
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == 'nul {"a\n'


def test_text_after_a_call_opens_a_block_of_its_own() -> None:
    deltas = [
        MessageDelta(kind="text", text="a"),
        MessageDelta(kind="call", text="f", call_index=0, call_id="call0"),
        MessageDelta(kind="arguments", text="{}", call_index=0),
        MessageDelta(kind="text", text=""),
        MessageDelta(kind="text", text="b"),
    ]
    message = Message(role=Role.ASSISTANT, parts=(Text("ab"),), tool_calls=called("{}").tool_calls)
    stream = assembled(events_of([streamed(deltas, answer(message))]))
    assert [block["type"] for block in stream["content"]] == ["text", "tool_use", "text"]
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}, echo(stream)]}).encode()
    assert same_message(DIALECT.parse(body).conversation.messages[1], message)


def test_arguments_of_a_closed_call_are_never_lost_silently() -> None:
    writer = DIALECT.writer(head(), request())
    writer.write([DELTAS[4], DELTAS[7]])
    with pytest.raises(ExactnessError, match="tool call 0"):
        writer.write([DELTAS[5]])


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (WireError(400, "invalid_request", "no", param="messages[0]"), 400, "invalid_request_error"),
        (WireError(401, "invalid_api_key", "no"), 401, "authentication_error"),
        (WireError(403, "session_closed", "no"), 403, "permission_error"),
        (WireError(404, "not_found", "no"), 404, "not_found_error"),
        (WireError(405, "method_not_allowed", "no"), 405, "invalid_request_error"),
        (WireError(408, "request_timeout", "no"), 408, "timeout_error"),
        (WireError(413, "request_too_large", "no"), 413, "request_too_large"),
        (WireError(429, "rate_limit_exceeded", "no", retry_after=1), 429, "rate_limit_error"),
        (WireError(500, "internal_error", "no"), 500, "api_error"),
        (WireError(502, "engine_error", "no"), 502, "api_error"),
        (WireError(503, "shutting_down", "no"), 529, "overloaded_error"),
        (WireError(529, "engine_error", "no"), 529, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error: WireError, status: int, kind: str) -> None:
    assert DIALECT.status(error) == status
    assert DIALECT.error(error) == {
        "type": "error",
        "error": {"type": kind, "message": "no", "code": error.code},
        "request_id": None,
    }


@pytest.mark.parametrize(("prompt", "words"), [(5000, "5000 tokens > 4096"), (4096, "4097 tokens > 4096")])
def test_context_overflow_is_what_harnesses_look_for(prompt: int, words: str) -> None:
    error = ContextOverflow(prompt, 4096)
    detail = DIALECT.error(error)["error"]
    assert (DIALECT.status(error), detail["type"]) == (400, "invalid_request_error")
    assert detail["message"] == f"prompt is too long: {words} maximum"
    assert f"{words} maximum".encode() in DIALECT.writer(head(), request()).fail(error)


def test_counts_and_models() -> None:
    assert DIALECT.counted(7) == {"input_tokens": 7}
    body = DIALECT.models(["a", "b"])
    assert [model["id"] for model in body["data"]] == ["a", "b"]
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "a", "b")
    assert DIALECT.models([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_three_turns_with_a_client_that_flips_its_turns_and_moves_its_marks(display: str) -> None:
    """As claude-code does: the newest block carries the cache mark; a turn that loses it becomes a string."""
    memory = Remembered({"h1": "Löschen?"})
    history: list[dict[str, Any]] = []
    known: list[Message] = []
    for turn in range(3):
        mark = {"cache_control": {"type": "ephemeral"}}
        if turn:
            results = [{"type": "tool_result", "tool_use_id": f"call{at}", "content": f"out {turn}"} for at in (1, 0)]
            history += [{"role": "user", "content": [*results[:-1], {**results[-1], **mark}]}]
        else:
            history += [{"role": "user", "content": [{"type": "text", "text": "go", **mark}]}]
        body = json.dumps(
            {"system": [{"type": "text", "text": "s", **mark}], "messages": history, "thinking": {"display": display}}
        )
        read = DIALECT.parse(body.encode(), memory=memory)
        now = read.conversation.messages
        assert read.warnings == ()
        assert len(now) == 2 + 3 * turn
        assert all(map(same_message, known, now))
        sent = DIALECT.sent(MESSAGE, read)
        known = [*now, sent]
        writer = DIALECT.writer(head(), read)
        stream = writer.open(12) + writer.write(DELTAS) + writer.close(answer(sent))
        history.append(echo(assembled(events_of([stream]))))
        for message in history:
            for block in message["content"] if isinstance(message["content"], list) else ():
                block.pop("cache_control", None)
        if not turn:
            history[0]["content"] = "go"
