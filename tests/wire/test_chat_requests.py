"""Chat requests: what each field becomes, and which complaint names which field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.conversation import same_message
from openforgerl.errors import WireError
from openforgerl.types import ForcedCall, Image, Message, Reasoning, Role, Text, ToolCall
from openforgerl.wire import CHAT, ChatDialect, Disposition, Request

CHAT_DIALECT = ChatDialect()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
REQUESTS = Path(__file__).parent / "golden" / "requests"


def parse(strict: bool = False, **body: Any) -> Request:
    return CHAT_DIALECT.parse(json.dumps({"messages": [USER], **body}).encode(), strict=strict)


def messages(*given: dict[str, Any]) -> tuple[Message, ...]:
    return parse(messages=list(given)).conversation.messages


def refused(**body: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**body)
    assert caught.value.status == 400
    return caught.value


def test_a_whole_turn() -> None:
    system, user, assistant, tool = messages(
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "x\n"},
    )
    assert system == Message(role=Role.SYSTEM, parts=(Text("Be brief."),), original_role="developer")
    assert user == Message(role=Role.USER, parts=(Text("a"), Text("b ")))
    # Arguments that are not JSON stay the bytes that they are.
    assert assistant == Message(
        role=Role.ASSISTANT,
        parts=(Reasoning("hm"),),
        tool_calls=(ToolCall(id="call_1", name="ls", arguments='{"a": 1'),),
    )
    assert tool == Message(role=Role.TOOL, parts=(Text("x\n"),), tool_call_id="call_1")


@pytest.mark.parametrize(
    "spelling",
    [{"content": ""}, {"content": None}, {}, {"content": []}, {"content": [{"type": "text", "text": ""}]}],
    ids=["empty", "null", "absent", "no parts", "an empty part"],
)
def test_an_empty_assistant_turn_is_kept_however_it_is_spelled(spelling: dict[str, Any]) -> None:
    turn = messages(USER, {"role": "assistant", "tool_calls": [], **spelling}, USER)[1]
    assert same_message(turn, Message(role=Role.ASSISTANT))


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": None}, ""),
        ({"reasoning": {"effort": 1}}, ""),
    ],
)
def test_both_spellings_of_a_thought_are_read(fields: dict[str, Any], thought: str) -> None:
    assert messages(USER, {"role": "assistant", "content": "x", **fields})[1].reasoning == thought


def test_leading_system_messages_become_one_and_later_ones_stay() -> None:
    first, user, later = messages(
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        USER,
        {"role": "system", "content": "three"},
    )
    assert (first.role, first.text, first.original_role) == (Role.SYSTEM, "one\n\ntwo", "developer")
    assert (user.role, later.role, later.text) == (Role.USER, Role.SYSTEM, "three")


def test_tools_are_given_to_templates_as_they_came_without_cache_marks() -> None:
    function = {"description": "List.", "name": "ls", "parameters": {"b": 1, "a": 2}, "strict": False}
    (tool,) = parse(
        tools=[{"function": {**function, "cache_control": {}}, "type": "function", "cache_control": {}}]
    ).conversation.tools
    assert (tool.name, tool.description, tool.parameters) == ("ls", "List.", {"b": 1, "a": 2})
    assert json.dumps(tool.raw) == json.dumps({"function": function, "type": "function"})  # key order too


def test_server_side_tools_are_left_out_and_reported() -> None:
    request = parse(tools=[{"type": "web_search"}, TOOL])
    assert [tool.name for tool in request.conversation.tools] == ["ls"]
    assert request.warnings == ("tools[0]: server-side tool 'web_search' was left out of the prompt",)


def test_tool_choice_none_leaves_the_tools_out() -> None:
    assert parse(tools=[TOOL], tool_choice="none").conversation.tools == ()
    for choice in ("auto", None):
        plain = parse(tools=[TOOL], tool_choice=choice)
        assert (len(plain.conversation.tools), plain.forced) == (1, None)


def test_a_forced_call() -> None:
    assert parse(tools=[TOOL], tool_choice="required").forced == ForcedCall(name=None)
    named = {"type": "function", "function": {"name": "ls"}}
    assert parse(tools=[TOOL], tool_choice=named).forced == ForcedCall(name="ls")


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("required", [], "tool_choice"),
        ("required", [{"type": "web_search"}], "tool_choice"),
        ("any", [TOOL], "tool_choice"),
        (7, [TOOL], "tool_choice"),
        ({"type": "allowed_tools"}, [TOOL], "tool_choice"),
        ({"type": "function", "function": {"name": "cat"}}, [TOOL], "tool_choice.function.name"),
        ({"type": "function", "function": {}}, [TOOL], "tool_choice.function.name"),
        ({"type": "function", "name": "ls"}, [TOOL], "tool_choice.function"),
    ],
)
def test_a_call_that_cannot_be_forced(choice: Any, tools: list[Any], param: str) -> None:
    assert refused(tools=tools, tool_choice=choice).param == param


def test_images() -> None:
    url = "data:image/png;base64,cG5n"  # the bytes "png"
    body = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "ls"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": url, "detail": "low"}]},
    ]
    request = parse(messages=body)
    user, _, tool = request.conversation.messages
    image = Image(hashlib.sha256(b"png").hexdigest(), "image/png")
    assert user.parts == (Text("Look:"), image)
    assert tool.parts == (image,)
    assert request.images == {image.sha256: b"png"}  # once
    assert request.unlisted == ()


@pytest.mark.parametrize(
    ("role", "part", "param"),
    [
        ("user", {"type": "image_url", "image_url": {"url": "https://h/x.png"}}, "image_url.url"),
        ("user", {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "image_url.url"),
        ("user", {"type": "image_url", "image_url": {"url": "data:image/tiff;base64,cG5n"}}, "image_url.url"),
        ("user", {"type": "image_url", "image_url": {}}, "image_url.url"),
        ("user", {"type": "input_audio", "input_audio": {}}, "type"),
        ("system", {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}, "type"),
    ],
)
def test_images_that_are_refused(role: str, part: dict[str, Any], param: str) -> None:
    assert refused(messages=[{"role": role, "content": [part]}]).param == f"messages[0].content[0].{param}"


def test_log_probabilities_are_asked_for() -> None:
    assert parse(logprobs=True, top_logprobs=0).logprobs
    assert not parse(logprobs=False).logprobs
    assert refused(logprobs=1).param == "logprobs"
    assert refused(logprobs=True, top_logprobs=3).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7.0}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_smaller_bound_on_tokens_wins(fields: dict[str, Any], most: int | None) -> None:
    assert parse(**fields).max_tokens == most


def test_what_was_asked_is_recorded() -> None:
    request = parse(temperature=0.2, top_p=0.9, seed=7, max_tokens=3, stop=["a", "b"], user="me", model="m")
    assert request.asked == {"temperature": 0.2, "top_p": 0.9, "seed": 7, "max_tokens": 3, "stop": ["a", "b"]}
    assert (request.stop, request.model) == (("a", "b"), "m")
    assert request.raw["user"] == "me"
    assert parse(stop="x").stop == ("x",)
    assert parse(stop="").stop == () == parse(stop=[]).stop


def test_streams() -> None:
    assert not parse().stream
    plain, counted = parse(stream=True), parse(stream=True, stream_options={"include_usage": True})
    assert (plain.stream, plain.include_usage) == (True, False)
    assert (counted.stream, counted.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "function", "name": "f", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": -(10**400)}, "seed"),
        ({"max_tokens": -(10**400)}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, None),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_a_complaint_names_the_field(body: dict[str, Any], param: str | None) -> None:
    if param is None:  # an empty list is an absent object
        assert not parse(**body).include_usage
        return
    error = refused(**body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "off",
    [{"n": 1}, {"logprobs": False}, {"response_format": {"type": "text"}}, {"logit_bias": {}}, {"functions": []}]
    + [{field.name: None} for field in CHAT.fields if field.name != "messages"],
)
def test_a_field_that_is_off_is_never_refused(off: dict[str, Any]) -> None:
    assert parse(**off).unlisted == ()


def test_unlisted_fields_are_reported_or_refused_under_strict() -> None:
    body: dict[str, Any] = {"messages": [{**USER, "mood": 1}], "shiny": 1}
    assert parse(**body).unlisted == ("shiny", "messages[].mood")
    with pytest.raises(WireError, match="shiny") as caught:
        parse(strict=True, **body)
    assert (caught.value.code, caught.value.param) == ("unlisted_field", "shiny")
    with pytest.raises(WireError, match=r"messages\[0\].mood"):
        parse(strict=True, messages=body["messages"])


def test_each_field_is_listed_once_and_says_why() -> None:
    names = [field.name for field in CHAT.fields]
    assert len(names) == len(set(names))
    assert all(field.note for field in CHAT.fields)
    assert all(field.disposition is Disposition.REFUSED for field in CHAT.fields if field.neutral)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'{"messages": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint) as caught:
        CHAT_DIALECT.parse(body)
    assert caught.value.status == 400


def test_half_a_surrogate_pair_is_mended_and_reported() -> None:
    """A harness that cuts tool output by UTF-16 units sends this; refusing it would kill the attempt."""
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d here \\ud83d\\ude00"}]}'
    request = CHAT_DIALECT.parse(body)
    assert request.conversation.messages[0].text == "cut \ufffd here \U0001f600"
    assert "surrogate" in request.warnings[0]


@pytest.mark.parametrize("path", sorted(REQUESTS.glob("*.json")), ids=lambda path: path.stem)
def test_requests_of_real_harnesses_are_taken_whole(path: Path) -> None:
    """Transcribed from the wire of the harness; every field must be known and every message kept."""
    body = json.loads(path.read_bytes())
    request = CHAT_DIALECT.parse(path.read_bytes(), strict=True)
    assert request.unlisted == () == request.warnings
    assert len(request.conversation.messages) == len(body["messages"])
    assert [tool.raw for tool in request.conversation.tools] == body.get("tools", [])
    for given, read in zip(body["messages"], request.conversation.messages, strict=True):
        content = given.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        assert read.text == text
        calls = given.get("tool_calls") or []
        assert [call.arguments for call in read.tool_calls] == [call["function"]["arguments"] for call in calls]


@pytest.mark.parametrize(
    ("stop", "complaint"),
    [
        (["a"] * 65, "stop: may hold 64 stop strings; got 65"),
        (["a", ""], "stop[1]: must have 1 to 1000 characters; it has 0"),
        (["a" * 1001], "stop[0]: must have 1 to 1000 characters; it has 1001"),
    ],
)
def test_stop_strings_are_bounded(stop: list[str], complaint: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], "stop": stop}).encode()
    with pytest.raises(WireError) as refused:
        ChatDialect().parse(body)
    assert refused.value.message == complaint
