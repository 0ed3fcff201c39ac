"""An answer that comes back is known again, whatever the client does to ids, thoughts and pieces on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openforgerl.conversation import same_message
from openforgerl.types import Conversation, FinishReason, Message, Part, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Address, Answer, Head, NoMemory, Request, SseReader

from .gemini_clients import (
    GEMINI,
    Json,
    OneSession,
    deltas,
    gemini_cli,
    javascript,
    keeps_all,
    keeps_bytes,
    parts_of,
    pi,
    results,
    streamed,
)

Client = Callable[[list[Json]], list[Json]]
CLIENTS: tuple[Client, ...] = (keeps_all, keeps_bytes, gemini_cli, pi)
SHOWN = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
ASK = {"role": "user", "parts": [{"text": "go"}]}


def request(**fields: Any) -> Request:
    return Request(dialect="gemini", model="policy", conversation=Conversation(messages=()), **fields)


def head(number: int = 0) -> Head:
    return Head(call_id=f"c{number}", model="policy", created=1, handle=f"h-{number}_x")


def answer(message: Message, finish: FinishReason = FinishReason.STOP) -> Answer:
    return Answer(message=message, finish=finish, prompt_tokens=3, completion_tokens=5)


def said(thought: str, text: str, *calls: ToolCall) -> Message:
    parts: list[Part] = [Reasoning(thought)] if thought else []
    parts += [Text(text)] if text else []
    return Message(role=Role.ASSISTANT, parts=tuple(parts), tool_calls=calls)


def asked(*contents: Json, **fields: Any) -> bytes:
    return json.dumps({"contents": list(contents), **fields}).encode()


CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=6) | st.just("unparsed_arguments"), JSON_VALUES, max_size=3).map(json.dumps),
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            " ",
            "null",
            "\n null ",
            "[1]",
            '"x"',
            '{"command": "echo oops',
            '{"unparsed_arguments": "x"}',
            '{"a": "\\ud800"}',
            '{"a": 1e999}',
            '{"a": ' + "9" * 400 + "}",
            '{"snake_case": 1, "snakeCase": 2}',
            '{"a":' * 121 + "1" + "}" * 121,
            '{"a":' * 127 + "1" + "}" * 127,
        ]
    ),
)
CALLS = st.lists(st.tuples(st.sampled_from(["bash", "read_file"]), ARGUMENTS), max_size=4).map(
    lambda pairs: [ToolCall(id=f"call{at}x", name=name, arguments=text) for at, (name, text) in enumerate(pairs)]
)
MESSAGES = st.builds(lambda thought, text, calls: said(thought, text, *calls), st.text(), st.text(), CALLS)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
@CALM
@given(message=MESSAGES, size=st.integers(1, 9), shown=st.booleans())
def test_an_echo_is_what_was_sent(client: Client, message: Message, size: int, shown: bool) -> None:
    if not message.text and not message.tool_calls:
        return  # these clients treat an answer without either as a failure, and ask again
    if client is pi and not message.reasoning and message.text and not message.text.strip():
        return  # pi drops blank text; such a turn is plain data (docs/wire-gemini.md)
    session = OneSession()
    session.keep(head(), message)
    asking = GEMINI.parse(asked(ASK, **(SHOWN if shown else {})), memory=session)
    contents = client(javascript(streamed(head(), asking, answer(message), size)))
    outputs = [f"output {at}" for at in range(len(message.tool_calls))]
    again = GEMINI.parse(asked(ASK, *contents, results(contents, outputs)), memory=session, strict=True)
    user, echoed, *told = again.conversation.messages
    assert user.text == "go"
    assert same_message(echoed, GEMINI.sent(message, asking))
    assert [tool.tool_call_id for tool in told if tool.role is Role.TOOL] == [call.id for call in message.tool_calls]
    assert [tool.text for tool in told if tool.role is Role.TOOL] == outputs
    assert again.warnings == ()


@CALM
@given(message=MESSAGES, size=st.integers(1, 9), shown=st.booleans())
def test_a_stream_says_what_the_whole_answer_says(message: Message, size: int, shown: bool) -> None:
    asking = GEMINI.parse(asked(ASK, **(SHOWN if shown else {})))
    whole = GEMINI.whole(head(), asking, answer(message))
    data = streamed(head(), asking, answer(message), size)
    chunks = javascript(data)
    (candidate,) = whole["candidates"]
    assert joined(parts_of(chunks)) == joined(candidate["content"]["parts"])
    assert chunks[-1]["candidates"][0]["finishReason"] == candidate["finishReason"] == "STOP"
    assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
    assert {chunk["responseId"] for chunk in chunks} == {"c0"}
    for part in candidate["content"]["parts"]:
        assert shown or not part.get("thought")


def joined(parts: list[Json]) -> tuple[str, str, list[Any]]:
    """Thought, text and calls; each signature with the first part of its kind."""
    thoughts = [part for part in parts if part.get("thought")]
    texts = [part for part in parts if "text" in part and not part.get("thought")]
    marks = [[part["thoughtSignature"] for part in kind if "thoughtSignature" in part] for kind in (thoughts, texts)]
    calls = [part for part in parts if "functionCall" in part]
    return "".join(part["text"] for part in thoughts), "".join(part["text"] for part in texts), [*marks, *calls]


ODD = said(
    "Löschen?",
    "안녕 😀\u2028\u0085\n\r\n",
    ToolCall(id="call0", name="bash", arguments='{"command": "ls \u2029"}'),
    ToolCall(id="call1", name="bash", arguments="oops"),
)


def test_a_stream_reads_the_same_when_cut_at_every_byte() -> None:
    data = streamed(head(), GEMINI.parse(asked(ASK, **SHOWN)), answer(ODD), 3)
    whole = SseReader().feed(data)
    assert [json.loads(event.data) for event in whole] == javascript(data)
    for cut in range(len(data) + 1):
        reader = SseReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole
    reader = SseReader()
    assert [event for byte in data for event in reader.feed(bytes([byte]))] == whole


def test_no_character_ends_a_line_for_any_line_reader() -> None:
    data = streamed(head(), GEMINI.parse(asked(ASK, **SHOWN)), answer(ODD), 3).decode()
    lines = [line for line in data.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert len(lines) == len(SseReader().feed(data.encode()))


def test_a_keep_alive_is_seen_by_nobody() -> None:
    writer = GEMINI.writer(head(), request())
    beat = writer.keep_alive()
    pieces = [beat, writer.open(3), beat, *(writer.write([delta]) + beat for delta in deltas(ODD, 7))]
    data = b"".join(pieces) + beat + writer.close(answer(ODD))
    assert javascript(data) == javascript(streamed(head(), request(), answer(ODD), 7))
    with pytest.raises(ValueError, match="Incomplete"):
        javascript(b": keep-alive\n\n" + data)


def test_an_unknown_handle_brings_no_thought_and_a_warning() -> None:
    message = said("secret", "hi", ToolCall(id="call0", name="bash", arguments="{}"))
    contents = gemini_cli(javascript(streamed(head(), request(), answer(message))))
    parsed = GEMINI.parse(asked(ASK, *contents), memory=NoMemory())
    echoed = parsed.conversation.messages[1]
    assert (echoed.reasoning, echoed.text, echoed.tool_calls[0].id) == ("", "hi", "call0")
    assert parsed.warnings == ("contents[].parts[].thoughtSignature: unknown here; the turn has no thought",)


def test_a_signature_of_somebody_else_is_left_out_with_a_warning() -> None:
    part = {"functionCall": {"id": "mine", "name": "bash", "args": {}}, "thoughtSignature": "U0lHTkFUVVJF"}
    parsed = GEMINI.parse(asked(ASK, {"role": "model", "parts": [part]}))
    assert parsed.conversation.messages[1].tool_calls == (ToolCall(id="mine", name="bash", arguments="{}"),)
    assert parsed.warnings == ("contents[].parts[].thoughtSignature: not one of ours; it was left out",)
    part["thoughtSignature"] = "skip_thought_signature_validator"
    assert GEMINI.parse(asked(ASK, {"role": "model", "parts": [part]})).warnings == ()


def test_a_changed_echo_is_not_what_was_sent() -> None:
    message = said("", "", ToolCall(id="call0", name="bash", arguments='{"command": "echo oops'))
    (content,) = gemini_cli(javascript(streamed(head(), request(), answer(message))))
    assert content["parts"][0]["functionCall"]["args"] == {"unparsed_arguments": '{"command": "echo oops'}
    content["parts"][0]["functionCall"]["args"] = {"command": "echo oops"}
    echoed = GEMINI.parse(asked(ASK, content)).conversation.messages[1]
    assert echoed.tool_calls[0].arguments == '{"command":"echo oops"}'
    assert not same_message(echoed, message)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_two_answers_in_a_row_stay_two_turns(client: Client) -> None:
    first = said("a", "one", ToolCall(id="call0", name="bash", arguments="{}"))
    second = said("b", "two", ToolCall(id="call1", name="bash", arguments="{}"))
    session = OneSession()
    contents: list[Json] = []
    for number, message in enumerate((first, second)):
        session.keep(head(number), message)
        contents += client(javascript(streamed(head(number), request(), answer(message))))
    merged = [{"role": "model", "parts": [part for content in contents for part in content["parts"]]}]
    for form in (contents, merged):
        _, *turns = GEMINI.parse(asked(ASK, *form), memory=session).conversation.messages
        assert len(turns) == 2
        assert all(map(same_message, turns, (first, second)))


TURNS = (
    said("Write it.", "I will create the file.", ToolCall(id="call00", name="run_shell_command", arguments='{"a": 1}')),
    said(
        "Three at once.",
        "",
        *(ToolCall(id=f"call1{at}", name="run_shell_command", arguments=f'{{"n": {at}}}') for at in range(3)),
    ),
    said("Done.", "Done: hello.txt created."),
)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_run_of_three_turns_is_one_growing_conversation(client: Client) -> None:
    session = OneSession()
    contents: list[Json] = [{"role": "user", "parts": [{"text": "<session_context>"}, {"text": "Create hello.txt"}]}]
    body = {
        "systemInstruction": {"role": "user", "parts": [{"text": "You are Gemini CLI."}]},
        "tools": [{"functionDeclarations": [{"name": "run_shell_command", "parametersJsonSchema": {}}]}],
        **SHOWN,
    }
    before: tuple[Message, ...] = ()
    for number, message in enumerate((*TURNS, None)):
        parsed = GEMINI.parse(
            asked(*contents, **body), address=Address(model="policy", stream=True), memory=session, strict=True
        )
        now = parsed.conversation.messages
        assert all(map(same_message, before, now))
        assert parsed.warnings == ()
        if message is None:
            break
        session.keep(head(number), message)
        echo = client(javascript(streamed(head(number), parsed, answer(message))))
        contents += echo
        if message.tool_calls:
            contents.append(results(echo, [f"{number}.{at}" for at in range(len(message.tool_calls))]))
        before = (*now, message)
    roles = [message.role.value for message in now]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "tool", "assistant"]
    assert [message.text for message in now if message.role is Role.TOOL] == ["0.0", "1.0", "1.1", "1.2"]
    assert [message.tool_call_id for message in now if message.role is Role.TOOL] == [
        "call00",
        "call10",
        "call11",
        "call12",
    ]
