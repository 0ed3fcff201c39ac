"""What the two upstream APIs are sent, and how their answers are read; by hand from their references."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from openforgerl.engines.options import RelayOptions
from openforgerl.engines.relay_anthropic import AnthropicApi
from openforgerl.engines.relay_api import Asking, UpstreamApi
from openforgerl.engines.relay_faults import Fault
from openforgerl.engines.relay_openai import OpenAiApi
from openforgerl.errors import EngineError
from openforgerl.types import (
    Conversation,
    FinishReason,
    ForcedCall,
    Image,
    Message,
    MessageDelta,
    Question,
    Reasoning,
    Role,
    Sampling,
    Text,
    TextChunk,
    ToolCall,
    ToolSpec,
)
from openforgerl.wire import SseEvent
from openforgerl.wire.dialect import Head
from openforgerl.wire.notes import Notes
from openforgerl.wire.responses_calls import Kind, WireTool, call_item, read_call

PNG = Image(sha256="ab" * 32, media_type="image/png")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TALK = Conversation(
    messages=(
        Message(role=Role.SYSTEM, parts=(Text("Be brief."),)),
        Message(role=Role.USER, parts=(Text("Look: "), PNG)),
        Message(
            role=Role.ASSISTANT,
            parts=(Reasoning("hm", "h1"), Text("I will.")),
            tool_calls=(
                ToolCall(id="callA", name="bash", arguments='{"command": "ls"}'),
                ToolCall(id="call.B", name="bash", arguments="{broken"),
            ),
        ),
        Message(role=Role.TOOL, parts=(Text("a.txt"), PNG), tool_call_id="callA"),
        Message(role=Role.TOOL, parts=(Text("bad"),), tool_call_id="call.B", is_error=True),
        Message(role=Role.USER, parts=(Text("Go on."),)),
        Message(role=Role.SYSTEM, parts=(Text("Two turns left."),)),
    ),
    tools=(
        ToolSpec(
            name="bash",
            raw={"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}},
        ),
        ToolSpec(name="done", description="End."),
    ),
)


def asking(conversation: Conversation = TALK, sampling: Sampling | None = None, **fields: Any) -> Asking:
    question = Question(conversation=conversation, images={PNG.sha256: b"\x89PNG"}, **fields)
    return Asking(
        question=question,
        sampling=sampling or Sampling(max_tokens=64),
        affinity="s",
        seed="c",
        model="m",
        limit=1000,
    )


def body(api: UpstreamApi, asked: Asking) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(api.body(asked)[0]))


def read(api: UpstreamApi, *values: Any, asked: Asking | None = None) -> tuple[list[MessageDelta], TextChunk]:
    reader = api.reader(asked or asking())
    deltas: list[MessageDelta] = []
    for value in values:
        deltas += reader.feed(SseEvent(value if isinstance(value, str) else json.dumps(value)))
    last = reader.close()
    return [*deltas, *last.deltas], last


def said(deltas: list[MessageDelta], kind: str, call: int = -1) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind and delta.call_index == call)


def test_openai_is_sent_the_conversation() -> None:
    sent = body(OpenAiApi(RelayOptions()), asking(sampling=Sampling(max_tokens=64, temperature=0.5, top_k=20)))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]},
        {
            "role": "assistant",
            "content": "I will.",
            "tool_calls": [
                {"id": "callA", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
                {"id": "call.B", "type": "function", "function": {"name": "bash", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "callA", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "call.B", "content": "bad"},
        {"role": "user", "content": [image]},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Two turns left."},
    ]
    empty = {"type": "object", "properties": {}}
    assert [tool["function"] for tool in sent["tools"]] == [
        {"name": "bash", "description": "Run.", "parameters": SCHEMA},
        {"name": "done", "description": "End.", "parameters": empty},
    ]
    assert {name: sent[name] for name in sent if name not in ("messages", "tools")} == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 64,
        "temperature": 0.5,
        "top_k": 20,
    }


def test_openai_options() -> None:
    api = OpenAiApi(RelayOptions(send_reasoning=True, max_tokens_field="max_completion_tokens"))
    sent = body(api, asking(forced=ForcedCall(name="bash")))
    assert sent["messages"][2]["reasoning_content"] == "hm"
    assert (sent["max_completion_tokens"], "max_tokens" in sent) == (64, False)
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "bash"}}
    assert body(api, asking(forced=ForcedCall()))["tool_choice"] == "required"


def test_anthropic_is_sent_turns_that_alternate() -> None:
    sent = body(AnthropicApi(), asking(forced=ForcedCall()))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}
    assert sent["system"] == "Be brief."
    assert sent["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I will."},
                {"type": "tool_use", "id": "callA", "name": "bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "call_B", "name": "bash", "input": {"arguments": "{broken"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "callA", "content": [{"type": "text", "text": "a.txt"}, image]},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_B",
                    "content": [{"type": "text", "text": "bad"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
                {"type": "text", "text": "<system>\nTwo turns left.\n</system>"},
            ],
        },
    ]
    assert sent["tools"][0] == {"name": "bash", "description": "Run.", "input_schema": SCHEMA}
    assert (sent["max_tokens"], sent["stream"], sent["tool_choice"]) == (64, True, {"type": "any"})
    assert "temperature" not in sent


def test_anthropic_says_what_it_cannot_send() -> None:
    api = AnthropicApi()
    assert api.body(asking(sampling=Sampling(seed=3)))[1] == ("the seed was not sent: the upstream's API has none",)
    for name, value in (("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("repetition_penalty", 1.1)):
        with pytest.raises(EngineError, match=name):
            api.body(asking(sampling=Sampling(**{name: value})))


def test_an_image_without_bytes_is_not_left_out_silently() -> None:
    lost = msgspec.structs.replace(asking(), question=Question(conversation=TALK))
    for api in (OpenAiApi(RelayOptions()), AnthropicApi()):
        with pytest.raises(EngineError, match="image abababababab"):
            api.body(lost)


def openai_chunk(delta: dict[str, Any], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **fields}


@pytest.mark.parametrize(
    "pieces",
    [
        # As the reference has it: an index and an id once, arguments after.
        [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}},
         {"index": 0, "function": {"arguments": "{}"}},
         {"index": 1, "id": "b", "function": {"name": "g"}}, {"index": 1, "function": {"arguments": "[1]"}}],
        # Every call at index 0, told apart by its id.
        [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
         {"index": 0, "id": "b", "function": {"name": "g", "arguments": "[1]"}}],
        # No index, no id; arguments as an object or repeated names.
        [{"function": {"name": "f", "arguments": {}}}, {"function": {"name": "g", "arguments": "[1]"}}],
        [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
         {"index": 0, "id": "a", "function": {"name": "f", "arguments": "}"}},
         {"index": 1, "id": "b", "function": {"name": "g", "arguments": "[1]"}}],
    ],
)  # fmt: skip
def test_openai_calls_as_servers_stream_them(pieces: list[dict[str, Any]]) -> None:
    chunks = [openai_chunk({"tool_calls": [piece]}) for piece in pieces]
    deltas, last = read(OpenAiApi(RelayOptions()), *chunks, openai_chunk({}, "tool_calls"), "[DONE]")
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["f", "g"]
    assert (said(deltas, "arguments", 0), said(deltas, "arguments", 1)) == ("{}", "[1]")
    assert last.finish is FinishReason.STOP


@pytest.mark.parametrize(
    "value",
    [
        "nothing",
        "[" * 100_000,
        openai_chunk({"content": 3}),
        openai_chunk({"content": [{"type": "text"}]}),
        openai_chunk({"tool_calls": {"index": 0}}),
        openai_chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        {"choices": [7]},
        {"choices": "x"},
    ],
)
def test_openai_chunks_that_are_none(value: Any) -> None:
    with pytest.raises(Fault) as caught:
        read(OpenAiApi(RelayOptions()), value)
    assert caught.value.again


def told(index: int | None, arguments: str, name: str = "", id: str = "") -> dict[str, Any]:
    """One piece of a tool call, with the fields that are not empty."""
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"function": function, **({"id": id} if id else {}), **({} if index is None else {"index": index})}


@pytest.mark.parametrize(
    "pieces",
    [
        # Told apart by index; by id alone; by id where every index is 0.
        [told(0, "", "f", "a"), told(1, "", "g", "b"), told(0, '{"x'), told(1, "[1"), told(0, '": 1}'), told(1, "]")],
        [told(None, '{"x', "f", "a"), told(None, "[1", "g", "b"), told(None, '": 1}', "", "a"),
         told(None, "]", "", "b")],
        [told(0, '{"x', "f", "a"), told(0, "[1", "g", "b"), told(0, '": 1}', "", "a"), told(0, "]", "", "b")],
        # The first call's object is closed only by its last piece, after all of the second; then white space.
        [told(0, '{"x": {"y": 1}', "f", "a"), told(1, "[1]", "g", "b"), told(0, "}"), told(1, ""), told(0, " ")],
        # The later call comes whole before the earlier has said anything.
        [told(0, "", "f", "a"), told(1, "[1]", "g", "b"), told(0, '{"x": 1}')],
    ],
)  # fmt: skip
def test_openai_calls_told_in_turns_come_one_after_another(pieces: list[dict[str, Any]]) -> None:
    chunks = [openai_chunk({"tool_calls": [piece]}) for piece in pieces]
    deltas, last = read(OpenAiApi(RelayOptions()), *chunks, openai_chunk({}, "tool_calls"), "[DONE]")
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["f", "g"]
    order = [delta.call_index for delta in deltas]
    assert order == sorted(order)
    first = '{"x": {"y": 1}}' if '{"y": 1}' in pieces[0]["function"]["arguments"] else '{"x": 1}'
    assert (said(deltas, "arguments", 0), said(deltas, "arguments", 1)) == (first, "[1]")
    assert last.finish is FinishReason.STOP


def test_openai_a_later_call_waits_no_longer_than_it_must() -> None:
    reader = OpenAiApi(RelayOptions()).reader(asking())

    def fed(*pieces: dict[str, Any]) -> list[tuple[int, str, str]]:
        deltas = reader.feed(SseEvent(json.dumps(openai_chunk({"tool_calls": list(pieces)}))))
        return [(delta.call_index, delta.kind, delta.text) for delta in deltas]

    assert fed(told(0, "{", "f", "a")) == [(0, "call", "f"), (0, "arguments", "{")]
    assert fed(told(1, '{"b"', "g", "b")) == []
    assert fed(told(0, "}")) == [(0, "arguments", "}"), (1, "call", "g"), (1, "arguments", '{"b"')]
    assert fed(told(1, ": 1}")) == [(1, "arguments", ": 1}")]
    # A third begins; the first cannot go on: its object was closed, and what was said is said.
    assert fed(told(2, "{oops", "h", "c")) == [(2, "call", "h"), (2, "arguments", "{oops")]
    with pytest.raises(Fault, match="after its arguments were whole"):
        fed(told(0, "{}"))


def test_openai_calls_behind_arguments_that_never_end_come_with_the_last_chunk() -> None:
    """Arguments that are no JSON object do not lose the calls behind them, nor do calls without any."""
    pieces = [told(0, "{oops", "f", "a"), told(1, "", "g", "b"), told(2, "{}", "h", "c")]
    deltas, last = read(
        OpenAiApi(RelayOptions()), openai_chunk({"tool_calls": pieces}), openai_chunk({}, "tool_calls"), "[DONE]"
    )
    assert [(delta.kind, delta.text) for delta in last.deltas] == [("call", "g"), ("call", "h"), ("arguments", "{}")]
    assert said(deltas, "arguments", 0) == "{oops"


@pytest.mark.parametrize(
    ("finish", "expected", "warned"),
    [
        ("stop", FinishReason.STOP, False),
        ("length", FinishReason.LENGTH, False),
        ("content_filter", FinishReason.LENGTH, True),
        ("eos", FinishReason.STOP, True),
    ],
)
def test_openai_ends(finish: str, expected: FinishReason, warned: bool) -> None:
    deltas, last = read(
        OpenAiApi(RelayOptions()),
        openai_chunk({"reasoning_content": "so", "content": ""}),
        openai_chunk({"reasoning": "so", "content": None}),
        openai_chunk({"content": "yes"}, finish),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}},
    )
    assert (said(deltas, "reasoning"), said(deltas, "text")) == ("soso", "yes")
    assert (last.finish, bool(last.warnings)) == (expected, warned)
    assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 2)


START = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 30}}}


def block(start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "content_block": start},
        *({"type": "content_block_delta", "delta": delta} for delta in deltas),
        {"type": "content_block_stop"},
    ]


def ends(reason: str) -> list[dict[str, Any]]:
    tail = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 12}}
    return [tail, {"type": "message_stop"}]


def test_anthropic_blocks() -> None:
    deltas, last = read(
        AnthropicApi(),
        START,
        {"type": "ping"},
        {"type": "some_new_event"},
        *block({"type": "text", "text": ""}, {"type": "text_delta", "text": "He"}, {"type": "text_delta", "text": "y"}),
        *block(
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": '{"a"'},
            {"type": "input_json_delta", "partial_json": ": 1}"},
        ),
        *block({"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}}),
        *ends("tool_use"),
    )
    assert said(deltas, "text") == "Hey"
    assert (said(deltas, "arguments", 0), said(deltas, "arguments", 1)) == ('{"a": 1}', "{}")
    assert last.finish is FinishReason.STOP and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (40, 30, 12)


@pytest.mark.parametrize(
    ("reason", "expected", "warned"),
    [
        ("max_tokens", FinishReason.LENGTH, False),
        ("model_context_window_exceeded", FinishReason.LENGTH, False),
        ("refusal", FinishReason.STOP, True),
    ],
)
def test_anthropic_ends(reason: str, expected: FinishReason, warned: bool) -> None:
    _, last = read(AnthropicApi(), START, *ends(reason))
    assert (last.finish, bool(last.warnings)) == (expected, warned)


def test_anthropic_streams_that_are_cut_or_broken() -> None:
    api = AnthropicApi()
    for values in ([START], [START, *ends("end_turn")[:1]]):
        with pytest.raises(Fault, match="ended before"):
            read(api, *values)
    with pytest.raises(Fault) as caught:
        read(api, START, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
    assert caught.value.again and caught.value.overloaded
    with pytest.raises(Fault) as caught:
        read(api, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}})
    assert not caught.value.again
    for value in ("{", {"type": "content_block_start", "content_block": {"type": "tool_use"}}, [1]):
        with pytest.raises(Fault):
            read(api, value)


def thought_before_a_call(api: AnthropicApi) -> tuple[str, list[MessageDelta]]:
    """The id of the call, and the answer."""
    deltas, _ = read(
        api,
        START,
        *block(
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "hm"},
            {"type": "signature_delta", "signature": "SIG"},
        ),
        *block({"type": "redacted_thinking", "data": "XYZ"}),
        *block({"type": "tool_use", "id": "t", "name": "bash", "input": {}}),
        *ends("tool_use"),
    )
    return next(delta.call_id for delta in deltas if delta.kind == "call"), deltas


def test_anthropic_thoughts_come_back_with_their_signatures() -> None:
    api = AnthropicApi()
    call_id, deltas = thought_before_a_call(api)
    assert said(deltas, "reasoning") == "hm"
    turn = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id=call_id, name="bash", arguments="{}"),))
    result = Message(role=Role.TOOL, parts=(Text("ok"),), tool_call_id=call_id)
    asked = asking(Conversation(messages=(TALK.messages[1], turn, result)))
    assert body(api, asked)["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "SIG"},
        {"type": "redacted_thinking", "data": "XYZ"},
        {"type": "tool_use", "id": call_id, "name": "bash", "input": {}},
    ]
    # Another session does not get them, whatever ids it sends.
    assert len(body(api, msgspec.structs.replace(asked, affinity="other"))["messages"][1]["content"]) == 1


def test_anthropic_thoughts_come_back_to_a_call_that_responses_echoes() -> None:
    """That dialect writes an id of ours as `call_...`, and its clients send it back so."""
    api = AnthropicApi()
    call_id, _ = thought_before_a_call(api)
    called = ToolCall(id=call_id, name="bash", arguments="{}")
    head = Head(call_id="0" * 32, model="m", created=0)
    item = call_item(called, WireTool(kind=Kind.FUNCTION, name="bash"), head, 0, "completed")
    echo = read_call(item, "input[1]", Notes(strict=True))
    assert echo.id == f"call_{call_id.removeprefix('call')}"
    turn = Message(role=Role.ASSISTANT, tool_calls=(echo,))
    result = Message(role=Role.TOOL, parts=(Text("ok"),), tool_call_id=echo.id)
    sent = body(api, asking(Conversation(messages=(TALK.messages[1], turn, result))))["messages"]
    assert sent[1]["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "SIG"},
        {"type": "redacted_thinking", "data": "XYZ"},
        {"type": "tool_use", "id": echo.id, "name": "bash", "input": {}},
    ]
    assert sent[2]["content"][0]["tool_use_id"] == echo.id
