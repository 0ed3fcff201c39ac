"""Responses answers: transcripts written by hand, reproduced to the byte and read back however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openforgerl.conversation import same_message
from openforgerl.errors import ContextOverflow, ExactnessError, WireError
from openforgerl.types import FinishReason, Message, MessageDelta, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Answer, Head, MessageBuilder, Request, SseReader

from .responses_client import (
    DIALECT,
    TOOLS,
    Remembered,
    ask,
    call,
    done_items,
    events_of,
    grown_items,
    say,
    think,
    without_ids,
)

STREAMS = Path(__file__).parent / "golden" / "responses" / "streams"
HEAD = Head(call_id="c1", model="policy", created=1_700_000_000, handle="HANDLE")

DELTAS = [
    think("Löschen?"),
    say("안녕 "),
    say("😀\n"),
    *call(0, "multi_agent_v1__spawn_agent", '{"message": ', '"go"}'),
    *call(1, "apply_patch", '{"in', 'put": "*** Be', "gin\\", 'n\\"\\u00', 'e9\\""}'),
    *call(2, "exec_command", "oops"),
]


def answer_of(deltas: list[MessageDelta], request: Request, finish: FinishReason = FinishReason.STOP) -> Answer:
    """The answer as the proxy hands it to the dialect: built from the deltas, thought under its handle."""
    built = MessageBuilder()
    built.add(deltas)
    message = built.message()
    parts = tuple(Reasoning(part.text, HEAD.handle) if isinstance(part, Reasoning) else part for part in message.parts)
    message = Message(role=Role.ASSISTANT, parts=parts, tool_calls=message.tool_calls)
    sent = DIALECT.sent(message, request)
    return Answer(message=sent, finish=finish, prompt_tokens=12, completion_tokens=30)


def stream(
    deltas: list[MessageDelta], request: Request, finish: FinishReason = FinishReason.STOP, *, lumped: bool = False
) -> bytes:
    writer = DIALECT.writer(HEAD, request)
    pieces = [writer.write(deltas)] if lumped else [writer.write([delta]) for delta in deltas]
    return writer.open(12) + b"".join(pieces) + writer.close(answer_of(deltas, request, finish))


def events(
    deltas: list[MessageDelta], request: Request, finish: FinishReason = FinishReason.STOP
) -> list[dict[str, Any]]:
    writer = DIALECT.writer(HEAD, request)
    opening = writer.open(12)
    return events_of(opening + writer.write(deltas) + writer.close(answer_of(deltas, request, finish)))


def test_a_thought_text_and_three_calls() -> None:
    request = ask(tools=TOOLS)
    writer = DIALECT.writer(HEAD, request)
    sent = writer.open(12) + b"".join(writer.write([delta]) for delta in DELTAS)
    sent += writer.close(answer_of(DELTAS, request))
    assert sent == (STREAMS / "thought-text-and-three-calls.sse").read_bytes()


def test_an_answer_cut_by_length_after_a_silence() -> None:
    request = ask()
    writer = DIALECT.writer(HEAD, request)
    sent = writer.keep_alive() + writer.open(12) + writer.keep_alive() + writer.write([say("cut sho")])
    sent += writer.close(answer_of([say("cut sho")], request, FinishReason.LENGTH))
    assert sent == (STREAMS / "cut-by-length.sse").read_bytes()


def test_a_broken_stream_ends_in_failed() -> None:
    writer = DIALECT.writer(HEAD, ask())
    error = WireError(502, "engine_error", "the engine is gone")
    sent = writer.open(12) + writer.write([say("half")]) + writer.fail(error)
    assert sent == (STREAMS / "broken-by-the-engine.sse").read_bytes()


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


def test_the_stream_holds_the_whole_answer() -> None:
    request = ask(tools=TOOLS)
    found = events(DELTAS, request)
    whole = DIALECT.whole(HEAD, request, answer_of(DELTAS, request))
    assert found[-1] == {"type": "response.completed", "sequence_number": len(found) - 1, "response": whole}
    assert done_items(found) == whole["output"] == grown_items(found)


def test_a_whole_answer() -> None:
    request = ask(tools=TOOLS, tool_choice="auto", metadata={"k": "v"}, max_output_tokens=5, store=False)
    whole = DIALECT.whole(HEAD, request, answer_of([say("hello")], request))
    assert whole["output"] == [
        {
            "type": "message",
            "id": "msg_c1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert (whole["id"], whole["object"], whole["status"]) == ("resp_c1", "response", "completed")
    assert (whole["metadata"], whole["max_output_tokens"], whole["store"]) == ({"k": "v"}, 5, False)
    assert whole["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 42,
    }


SHELL = '{"command": ["ls", "-l"], "timeout_ms": 5}'


@pytest.mark.parametrize(
    ("name", "arguments", "item", "echoed"),
    [
        (
            "local_shell",
            SHELL,
            {
                "type": "local_shell_call",
                "id": "lsh_c1_0",
                "action": {
                    "type": "exec",
                    "command": ["ls", "-l"],
                    "env": {},
                    "timeout_ms": 5,
                    "user": None,
                    "working_directory": None,
                },
            },
            SHELL,
        ),
        ("local_shell", '{"command": "ls"}', {"type": "function_call", "arguments": '{"command": "ls"}'}, None),
        ("local_shell", '{"command": [], "x": 1}', {"type": "function_call"}, None),
        ("local_shell", '{"command": [], "user": null}', {"type": "function_call", "id": "fc_c1_0"}, None),
        (
            "tool_search",
            '{"query": "x"}',
            {"type": "tool_search_call", "id": "tsc_c1_0", "execution": "client", "arguments": {"query": "x"}},
            None,
        ),
        ("tool_search", '{"query": ', {"type": "tool_search_call", "arguments": '{"query": '}, None),
        ("tool_search", '"words"', {"type": "tool_search_call", "arguments": '"words"'}, None),
        ("tool_search", "null", {"type": "tool_search_call", "arguments": "null"}, None),
        # As an object it could not be sent back: requests may be nested 128 levels deep.
        ("tool_search", '{"a":' * 127 + "1" + "}" * 127, {"arguments": '{"a":' * 127 + "1" + "}" * 127}, None),
        ("apply_patch", '{"input": "a"}', {"type": "custom_tool_call", "input": "a"}, None),
        ("apply_patch", "{oops", {"type": "custom_tool_call", "input": "{oops"}, '{"input":"{oops"}'),
        (
            "multi_agent_v1__note",
            '{"input": "n"}',
            {"type": "custom_tool_call", "name": "note", "namespace": "multi_agent_v1", "input": "n"},
            None,
        ),
        ("multi_agent_v1__nope", "{}", {"type": "function_call", "name": "multi_agent_v1__nope"}, None),
        ("no_such_tool", "oops", {"type": "function_call", "name": "no_such_tool", "arguments": "oops"}, None),
    ],
)
def test_every_kind_of_call(name: str, arguments: str, item: dict[str, Any], echoed: str | None) -> None:
    """What the wire carries, and what the record says the echo will say (None: what was sampled)."""
    request = ask(tools=TOOLS)
    deltas = call(0, name, *arguments)
    sent = answer_of(deltas, request).message
    assert sent.tool_calls[0].arguments == (arguments if echoed is None else echoed)
    found = events(deltas, request)
    (given,) = done_items(found)
    assert {key: given[key] for key in item} == item
    assert (given["call_id"], given["status"], "namespace" in given) == ("call0", "completed", "namespace" in item)
    assert (
        [given] == found[-1]["response"]["output"] == DIALECT.whole(HEAD, request, answer_of(deltas, request))["output"]
    )
    assert grown_items(found) == [given]
    for echo in ([given], without_ids([given])):
        (turn,) = ask(input=echo).conversation.messages
        assert same_message(turn, sent)


def test_a_call_found_by_search_goes_to_its_namespace() -> None:
    tools = [{"type": "namespace", "name": "cal", "tools": [{"type": "function", "name": "add"}]}]
    found = {"type": "tool_search_output", "call_id": "k", "tools": tools}
    request = ask(tools=TOOLS, input=[{"role": "user", "content": "x"}, found], tool_choice="none")
    assert request.conversation.tools == ()
    (item,) = done_items(events(call(0, "cal__add", "{}"), request))
    assert (item["namespace"], item["name"]) == ("cal", "add")
    (patch,) = done_items(events(call(0, "apply_patch", "x"), request))
    assert patch["type"] == "custom_tool_call"


@pytest.mark.parametrize(
    ("deltas", "finish", "kinds", "status"),
    [
        ([], FinishReason.STOP, ["message"], "completed"),
        ([], FinishReason.LENGTH, ["message"], "incomplete"),
        ([think("t")], FinishReason.STOP, ["reasoning", "message"], "completed"),
        ([think("t")], FinishReason.LENGTH, ["reasoning"], "incomplete"),
        (call(0, "exec_command"), FinishReason.STOP, ["function_call"], "completed"),
        (call(0, "exec_command", '{"cmd'), FinishReason.LENGTH, ["function_call"], "incomplete"),
        ([say("a"), *call(0, "local_shell", '{"com')], FinishReason.LENGTH, ["message", "function_call"], "incomplete"),
        (call(0, "apply_patch", '{"input": "a\\'), FinishReason.LENGTH, ["custom_tool_call"], "incomplete"),
    ],
)
def test_empty_and_cut_answers(deltas: list[MessageDelta], finish: FinishReason, kinds: list[str], status: str) -> None:
    request = ask(tools=TOOLS)
    found = events(deltas, request, finish)
    response = found[-1]["response"]
    assert found[-1]["type"] == f"response.{status}"
    assert response == DIALECT.whole(HEAD, request, answer_of(deltas, request, finish))
    assert [item["type"] for item in response["output"]] == kinds
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    # Every item but the last is whole; a thought has no status.
    assert [item.get("status", status) for item in response["output"]] == ["completed"] * (len(kinds) - 1) + [status]
    memory = Remembered()
    memory.keep(HEAD, request, answer_of(deltas, request, finish).message)
    (turn,) = ask(memory, input=response["output"]).conversation.messages
    assert same_message(turn, answer_of(deltas, request, finish).message)


def test_text_after_a_call_is_a_second_message() -> None:
    request = ask(tools=TOOLS)
    deltas = [say("a"), *call(0, "exec_command", "{}"), say("b"), think("t"), *call(1, "exec_command", "{}")]
    items = done_items(events(deltas, request))
    assert [item["id"] for item in items] == ["msg_c1", "fc_c1_0", "msg_c1_1", "rs_c1", "fc_c1_1"]
    memory = Remembered()
    sent = answer_of(deltas, request).message
    memory.keep(HEAD, request, sent)
    (turn,) = ask(memory, input=items).conversation.messages
    assert same_message(turn, sent)
    assert turn.text == "ab"


def test_ids_hold_letters_digits_and_underscores_only() -> None:
    request = ask(tools=TOOLS)
    head = Head(call_id="a-1/b", model="policy", created=1, handle="HANDLE")
    whole = DIALECT.whole(head, request, answer_of(DELTAS, request))
    assert [item["id"] for item in whole["output"]] == ["rs_a1b", "msg_a1b", "fc_a1b_0", "ctc_a1b_1", "fc_a1b_2"]
    assert whole["id"] == "resp_a1b"


def test_arguments_outside_of_their_call_are_a_bug() -> None:
    writer = DIALECT.writer(HEAD, ask(tools=TOOLS))
    writer.write([*call(0, "exec_command"), *call(1, "exec_command")])
    with pytest.raises(ExactnessError, match="tool call 0"):
        writer.write([MessageDelta(kind="arguments", text="x", call_index=0)])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ContextOverflow(9, 8), "context_length_exceeded", None),
        (WireError(403, "session_closed", "over"), "session_closed", "over"),
        (
            WireError(429, "rate_limit_exceeded", "full.", retry_after=2.5),
            "rate_limit_exceeded",
            "full. Please try again in 2.5s.",
        ),
        (WireError(429, "rate_limit_exceeded", "full"), "rate_limit_exceeded", "full"),
        (
            WireError(503, "shutting_down", "stopping", retry_after=5),
            "rate_limit_exceeded",
            "stopping. Please try again in 5s.",
        ),
        (WireError(500, "internal_error", "a bug"), "server_error", "a bug"),
    ],
)
def test_errors_in_a_stream_have_the_codes_that_clients_act_on(
    error: WireError, code: str, message: str | None
) -> None:
    (event,) = events_of(DIALECT.writer(HEAD, ask()).fail(error))
    assert (event["type"], event["sequence_number"], event["response"]["status"]) == ("response.failed", 0, "failed")
    assert event["response"]["error"] == {"code": code, "message": error.message if message is None else message}


def test_errors_have_openais_shape() -> None:
    error = WireError(429, "rate_limit_exceeded", "full", retry_after=1)
    assert DIALECT.error(error) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    }
    assert DIALECT.status(error) == 429
    overflow = DIALECT.error(ContextOverflow(5000, 4096))["error"]
    assert (overflow["code"], overflow["param"]) == ("context_length_exceeded", "input")
    assert "maximum context length is 4096 tokens" in overflow["message"]


def test_counts_and_models() -> None:
    assert DIALECT.counted(7) == {"object": "response.input_tokens", "input_tokens": 7}
    assert DIALECT.models(["policy"])["data"][0]["id"] == "policy"


def assert_same(found: Sequence[Message], expected: Sequence[Message]) -> None:
    assert len(found) == len(expected)
    for at, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert same_message(left, right), at


def test_a_transcript_of_three_turns_as_codex_sends_it() -> None:
    """Every request is the one before, our items as they came, and what the harness adds."""
    memory = Remembered()
    body: dict[str, Any] = {"tools": TOOLS, "stream": True, "store": False, "include": ["reasoning.encrypted_content"]}
    history: list[dict[str, Any]] = [
        {
            "type": "message",
            "id": "msg_0-1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be good."}],
        },
        {"type": "message", "id": "msg_0-2", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
    ]
    turns = [
        [
            think("First, look."),
            say("Looking."),
            *call(0, "exec_command", '{"cmd": "ls"}'),
            *call(1, "exec_command", "{"),
        ],
        [think("Now patch."), *call(0, "apply_patch", '{"input": "*** Begin Patch\\n"}', call_id="call2")],
        [say("Done.")],
    ]
    expected: list[Message] = list(ask(input=history).conversation.messages)
    for number, deltas in enumerate(turns):
        request = ask(memory, input=history, **body)
        assert request.unlisted == () == request.warnings
        assert_same(request.conversation.messages, expected)
        head = Head(call_id=f"{number:032x}", model="policy", created=1, handle=f"handle-{number}")
        answer = answer_of(deltas, request)
        parts = tuple(Reasoning(p.text, head.handle) if isinstance(p, Reasoning) else p for p in answer.message.parts)
        sent = Message(role=Role.ASSISTANT, parts=parts, tool_calls=answer.message.tool_calls)
        memory.keep(head, request, sent)
        writer = DIALECT.writer(head, request)
        found = events_of(writer.open(1) + writer.write(deltas) + writer.close(answer))
        history += done_items(found)
        expected.append(sent)
        for made in sent.tool_calls:
            kind = "custom_tool_call_output" if made.name == "apply_patch" else "function_call_output"
            history.append({"type": kind, "id": "fco_1-2", "call_id": made.id, "output": f"ran {made.id}"})
            expected.append(Message(role=Role.TOOL, parts=(Text(f"ran {made.id}"),), tool_call_id=made.id))
    assert expected[2].tool_calls[1] == ToolCall(id="call1", name="exec_command", arguments="{")
    assert len(ask(memory, input=history, **body).conversation.messages) == 2 + 3 + 2 + 1
    # The same session by reference: the last response and nothing else.
    answered = ask(memory, previous_response_id=f"resp_{2:032x}", input="Thanks.", **body).conversation.messages
    assert_same(answered, [*expected, Message(role=Role.USER, parts=(Text("Thanks."),))])
