"""Messages requests: what each field and block becomes, and which complaint names which field."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.conversation import same_message, same_tools
from openforgerl.errors import WireError
from openforgerl.types import Image, Message, Reasoning, Role, Text, ToolCall
from openforgerl.wire import MESSAGES, Disposition, ForcedCall, MessagesDialect, Request

from .messages_client import Remembered

DIALECT = MessagesDialect()
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}}
RUNS = Path(__file__).parent / "golden" / "messages" / "runs"
PIXEL = b"\x89PNG one pixel"
IMAGE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PIXEL).decode()}


def parse(strict: bool = False, memory: Remembered | None = None, **body: Any) -> Request:
    data = json.dumps({"messages": [USER], **body}).encode()
    return DIALECT.parse(data, strict=strict, memory=memory or Remembered({}))


def messages(*given: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse(messages=list(given), **fields).conversation.messages


def refused(**body: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**body)
    assert caught.value.status == 400
    return caught.value


def test_a_whole_turn() -> None:
    system, user, assistant, result, then = messages(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "scope": "turn", "ttl": "1h"}},
                {"type": "text", "text": "b "},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "h1"},
                {"type": "text", "text": "I "},
                {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"b": 1.0, "a": "é"}},
                {"type": "text", "text": "list."},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x\n", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        memory=Remembered({"h1": "hm"}),
    )
    assert system == Message(role=Role.SYSTEM, parts=(Text("Be brief."), Text("Be kind.")))
    assert user == Message(role=Role.USER, parts=(Text("a"), Text("b ")))
    assert assistant == Message(
        role=Role.ASSISTANT,
        parts=(Reasoning("hm", "h1"), Text("I list.")),
        tool_calls=(ToolCall(id="toolu_1", name="ls", arguments='{"b":1.0,"a":"é"}'),),
    )
    assert result == Message(role=Role.TOOL, parts=(Text("x\n"),), tool_call_id="toolu_1", is_error=True)
    assert then == Message(role=Role.USER, parts=(Text("go on"),))


def test_tool_results_and_what_stands_between_keep_their_order() -> None:
    given = {
        "role": "user",
        "content": [
            {"type": "text", "text": "first"},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "B"}]},
            {"type": "tool_result", "tool_use_id": "a"},
            {"type": "text", "text": "x"},
            {"type": "text", "text": "y"},
        ],
    }
    assert messages(given) == (
        Message(role=Role.USER, parts=(Text("first"),)),
        Message(role=Role.TOOL, parts=(Text("B"),), tool_call_id="b"),
        Message(role=Role.TOOL, tool_call_id="a"),
        Message(role=Role.USER, parts=(Text("x"), Text("y"))),
    )


def test_empty_blocks_behind_a_tool_result_make_no_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": None, "is_error": None}
    found = messages({"role": "user", "content": [result, {"type": "text", "text": ""}]})
    assert found == (Message(role=Role.TOOL, tool_call_id="a"),)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_user_turn_is_kept(content: Any) -> None:
    assert messages(USER, {"role": "user", "content": content})[1] == Message(role=Role.USER)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_assistant_turn_is_kept(content: Any) -> None:
    assert messages(USER, {"role": "assistant", "content": content}, USER)[1] == Message(role=Role.ASSISTANT)


def test_an_image_in_a_turn_and_in_a_tool_result_is_stored_once() -> None:
    shown = Image(sha256=hashlib.sha256(PIXEL).hexdigest(), media_type="image/png")
    block = {"type": "image", "source": IMAGE, "cache_control": {"type": "ephemeral"}}
    request = parse(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "see"}, block, {"type": "text", "text": "?"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]},
        ]
    )
    user, result = request.conversation.messages
    assert user.parts == (Text("see"), shown, Text("?"))
    assert result.parts == (shown,)
    assert request.images == {shown.sha256: PIXEL}


def test_documents_of_text_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    blocks = {"type": "content", "content": [{"type": "text", "text": "t"}, {"type": "image", "source": IMAGE}]}
    (user,) = messages(
        {
            "role": "user",
            "content": [
                {"type": "document", "source": plain, "title": "T", "context": None, "citations": {"enabled": False}},
                {"type": "document", "source": blocks},
                {"type": "document", "source": {"type": "content", "content": "str"}},
            ],
        }
    )
    assert user.text == "T\nbodytstr"
    assert sum(isinstance(part, Image) for part in user.parts) == 1


def test_system_messages_at_the_beginning_become_one_and_later_ones_stay() -> None:
    reminder = {"role": "system", "content": [{"type": "text", "text": "later"}], "output_config": {"effort": "low"}}
    first, user, later = messages({"role": "system", "content": "two"}, USER, reminder, system="one")
    assert (first.role, first.text) == (Role.SYSTEM, "one\n\ntwo")
    assert (user.role, later.role, later.text) == (Role.USER, Role.SYSTEM, "later")
    assert parse(messages=[USER, reminder], strict=True).unlisted == ()


@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert [message.role for message in messages(USER, system=system)] == [Role.USER]


def test_system_blocks_inside_a_user_turn() -> None:
    given = {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "mid_conv_system", "content": [{"type": "text", "text": "be brief"}]},
            {"type": "text", "text": "b"},
        ],
    }
    assert [(m.role, m.text) for m in messages(given)] == [
        (Role.USER, "a"),
        (Role.SYSTEM, "be brief"),
        (Role.USER, "b"),
    ]


def test_changes_of_the_tools_are_left_out_and_reported() -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "ls"}}
    request = parse(messages=[USER, {"role": "system", "content": [change]}], tools=[{**TOOL, "defer_loading": True}])
    assert len(request.conversation.messages) == 1
    assert [tool.name for tool in request.conversation.tools] == ["ls"]
    assert request.warnings == (
        "messages[1].content[0]: tool_addition was left out of the prompt; every tool in `tools` stays on offer",
    )


def test_a_reference_to_a_tool_in_a_result_is_its_name() -> None:
    content = [{"type": "tool_reference", "tool_name": "ls"}, {"type": "tool_reference", "tool_name": "cat"}]
    (result,) = messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]})
    assert result.text == "ls\ncat\n"


@pytest.mark.parametrize(
    ("blocks", "thought", "warned"),
    [
        ([{"type": "thinking", "thinking": "deep", "signature": "ours"}], "deep", None),
        ([{"type": "thinking", "thinking": "", "signature": "ours"}], "deep", None),
        ([{"type": "redacted_thinking", "data": "ours"}], "deep", None),
        ([{"type": "thinking", "thinking": "shallow", "signature": "ours"}], "shallow", "was altered"),
        ([{"type": "thinking", "thinking": "deep", "signature": "theirs"}], "", "unknown signature"),
        ([{"type": "redacted_thinking", "data": "theirs"}], "", "unknown signature"),
        ([{"type": "thinking", "thinking": "plain", "signature": ""}], "plain", None),
        ([{"type": "thinking", "thinking": "plain"}], "plain", None),
        (
            [
                {"type": "thinking", "thinking": "de", "signature": "ours"},
                {"type": "text", "text": "x"},
                {"type": "thinking", "thinking": "ep", "signature": "ours"},
            ],
            "deep",
            None,
        ),
        (
            [
                {"type": "thinking", "thinking": "", "signature": "ours"},
                {"type": "thinking", "thinking": "er", "signature": "also ours"},
            ],
            "deeper",
            None,
        ),
    ],
)
def test_thoughts_come_back_by_their_signature(blocks: Any, thought: str, warned: str | None) -> None:
    request = parse(
        messages=[USER, {"role": "assistant", "content": blocks}, USER],
        memory=Remembered({"ours": "deep", "also ours": "er"}),
    )
    assert request.conversation.messages[1].reasoning == thought
    if warned is None:
        assert request.warnings == ()
    else:
        (warning,) = request.warnings
        assert warned in warning


def test_tools_come_as_schemas_whatever_marks_they_carry() -> None:
    marks = {"cache_control": {}, "defer_loading": True, "eager_input_streaming": True, "strict": True}
    plain, marked = parse(tools=[TOOL]), parse(tools=[{**TOOL, **marks, "type": "custom"}], strict=True)
    (tool,) = plain.conversation.tools
    assert (tool.name, tool.description, tool.parameters) == ("ls", "List.", {"type": "object"})
    assert same_tools(plain.conversation.tools, marked.conversation.tools)
    assert parse(tools=[{"name": "f", "input_schema": {}}]).conversation.tools[0].description == ""


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20260120", "tool_search_tool_bm25_20251119"])
def test_server_tools_are_left_out_and_reported_unless_asked_for(kind: str) -> None:
    server = {"type": kind, "name": "server_side"}
    request = parse(tools=[server, TOOL])
    assert [tool.name for tool in request.conversation.tools] == ["ls"]
    assert request.warnings == (f"tools[0]: server-side tool {kind!r} was left out of the prompt",)
    assert refused(tools=[server], tool_choice={"type": "tool", "name": "server_side"}).param == "tool_choice.name"
    assert refused(tools=[server], tool_choice={"type": "any"}).param == "tool_choice.type"


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "computer_20251124", "memory_20250818"])
def test_client_tools_without_a_schema_are_refused(kind: str) -> None:
    error = refused(tools=[TOOL, {"type": kind, "name": "x"}])
    assert (error.param, error.code) == ("tools[1].type", "unsupported_field")
    assert kind in error.message


@pytest.mark.parametrize(
    ("choice", "forced", "offered"),
    [
        (None, None, 1),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, 1),
        ({"type": "none"}, None, 0),
        ({"type": "any"}, ForcedCall(), 1),
        ({"type": "tool", "name": "ls"}, ForcedCall(name="ls"), 1),
    ],
)
def test_tool_choice(choice: Any, forced: ForcedCall | None, offered: int) -> None:
    request = parse(tools=[TOOL], tool_choice=choice, strict=True)
    assert (request.forced, len(request.conversation.tools)) == (forced, offered)


def test_what_was_asked_is_recorded() -> None:
    thinking = {"type": "enabled", "budget_tokens": 7168, "display": "summarized"}
    fields: dict[str, Any] = {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 8.0,
        "stop_sequences": ["a", "b"],
    }
    request = parse(**fields, model="m", stream=True, thinking=thinking, metadata={"user_id": "me"}, strict=True)
    assert request.asked == fields
    assert (request.stop, request.max_tokens, request.model, request.stream) == (("a", "b"), 8, "m", True)
    assert request.raw["thinking"] == thinking
    assert (parse().stop, parse().max_tokens, parse().stream, parse().asked) == ((), None, False, {})


def test_an_attribution_header_is_kept_and_reported() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch=1;"
    request = parse(system=[{"type": "text", "text": header}, {"type": "text", "text": "You"}])
    assert request.conversation.messages[0].parts == (Text(header), Text("You"))
    assert len(request.warnings) == 1 and request.warnings[0].startswith("system[0]")


def test_a_last_assistant_turn_is_kept_and_reported() -> None:
    request = parse(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert request.conversation.messages[-1].text == "The answer is ("
    assert "does not continue it" in request.warnings[0]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}]}


def result(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return user({"type": "tool_result", "tool_use_id": "a", "content": list(blocks), **fields})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "tool", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": {}}]}, "messages[0].content"),
        (user("hi"), "messages[0].content[0]"),
        (user({"text": "hi"}), "messages[0].content[0].type"),
        (user({"type": ["text"]}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type"),
        (user({"type": "tool_use"}), "messages[0].content[0].type"),
        (user({"type": "search_result"}), "messages[0].content[0].type"),
        (user({"type": "image"}), "messages[0].content[0].source"),
        (user({"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].source.type"),
        (user({"type": "image", "source": {**IMAGE, "data": "a?"}}), "messages[0].content[0].source"),
        (user({"type": "image", "source": {**IMAGE, "data": "é"}}), "messages[0].content[0].source"),
        (user({"type": "image", "source": {**IMAGE, "data": ""}}), "messages[0].content[0].source"),
        (user({"type": "image", "source": {**IMAGE, "media_type": "pdf"}}), "messages[0].content[0].source"),
        (user({"type": "document", "source": {"type": "base64"}}), "messages[0].content[0].source.type"),
        (
            user({"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}}),
            "messages[0].content[0].source.content[0].type",
        ),
        (user({"type": "mid_conv_system", "content": "x"}), "messages[0].content[0].content"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (result({"type": "tool_use"}), "messages[0].content[0].content[0].type"),
        (result({"type": "search_result"}), "messages[0].content[0].content[0].type"),
        (result(is_error="yes"), "messages[0].content[0].is_error"),
        (assistant({"type": "image", "source": IMAGE}), "messages[1].content[0].type"),
        (assistant({"type": "server_tool_use"}), "messages[1].content[0].type"),
        (assistant({"type": "web_search_tool_result"}), "messages[1].content[0].type"),
        (assistant({"type": "mcp_tool_use"}), "messages[1].content[0].type"),
        (assistant({"type": "thinking", "signature": "x"}), "messages[1].content[0].thinking"),
        (assistant({"type": "thinking", "thinking": "", "signature": 5}), "messages[1].content[0].signature"),
        (assistant({"type": "redacted_thinking"}), "messages[1].content[0].data"),
        (assistant({"type": "tool_use", "name": "f", "input": {}}), "messages[1].content[0].id"),
        (assistant({"type": "tool_use", "id": "a", "input": {}}), "messages[1].content[0].name"),
        (assistant({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}), "messages[1].content[0].input"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image", "source": IMAGE}]}, "system[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "type": 5}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "cat"}}, "tool_choice.name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
        ({"thinking": "on"}, "thinking"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_a_complaint_names_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(**body)
    assert error.param == param
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    "off",
    [{"mcp_servers": []}, {"output_config": {"effort": "max", "format": None}}]
    + [{field.name: None} for field in MESSAGES.fields if field.name != "messages"],
)
def test_a_field_that_is_off_is_never_refused(off: dict[str, Any]) -> None:
    assert parse(**off, strict=True).unlisted == ()


def test_unlisted_fields_are_reported_or_refused_under_strict() -> None:
    block = {"type": "text", "text": "hi", "color": 1}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [block, block], "mood": 1}], "shiny": 1}
    assert parse(**body).unlisted == ("shiny", "messages[].mood", "messages[].content[].color")
    with pytest.raises(WireError, match="shiny") as caught:
        parse(strict=True, **body)
    assert (caught.value.code, caught.value.param) == ("unlisted_field", "shiny")
    with pytest.raises(WireError, match=r"messages\[0\].content\[0\].color"):
        parse(strict=True, messages=[{"role": "user", "content": [block]}])


def test_each_field_is_listed_once_and_says_why() -> None:
    names = [field.name for field in MESSAGES.fields]
    assert len(names) == len(set(names))
    assert all(field.note for field in MESSAGES.fields)
    assert all(field.disposition is Disposition.REFUSED for field in MESSAGES.fields if field.neutral)


def runs() -> list[Path]:
    return sorted(RUNS.glob("*.json"))


def recorded(path: Path) -> list[Request]:
    """The run's requests as its session would read them: what the lab's server signed is remembered."""
    bodies = json.loads(path.read_bytes())
    blocks = [b for body in bodies for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
    memory = Remembered({b["signature"]: b["thinking"] for b in blocks if b["type"] == "thinking"})
    return [DIALECT.parse(json.dumps(body).encode(), strict=True, memory=memory) for body in bodies]


@pytest.mark.parametrize("path", runs(), ids=lambda path: path.stem)
def test_requests_of_real_harnesses_are_taken_whole(path: Path) -> None:
    """Transcribed from the wire; every field must be known, and no text, call, result, thought or image lost."""
    for body, request in zip(json.loads(path.read_bytes()), recorded(path), strict=True):
        found = request.conversation.messages
        assert request.unlisted == ()
        assert all("attribution header" in warning for warning in request.warnings)
        given = [{"role": "system", "content": body["system"]}, *body["messages"]]
        blocks: list[dict[str, Any]] = []
        for message in given:
            content = message["content"]
            blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
        results = [block for block in blocks if block["type"] == "tool_result"]
        for block in results:
            content = block["content"]
            blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
        kinds = {"text": Text, "image": Image, "thinking": Reasoning}
        for kind, part in kinds.items():
            texts = sorted(b.get(kind, "") for b in blocks if b["type"] == kind and b.get(kind, " "))
            parts = [p for message in found for p in message.parts if isinstance(p, part)]
            assert texts == sorted(p.text if not isinstance(p, Image) else "" for p in parts)
        assert [call.id for m in found for call in m.tool_calls] == [b["id"] for b in blocks if b["type"] == "tool_use"]
        assert [m.tool_call_id for m in found if m.role is Role.TOOL] == [b["tool_use_id"] for b in results]
        assert [tool.name for tool in request.conversation.tools] == [tool["name"] for tool in body.get("tools", [])]


@pytest.mark.parametrize("path", [p for p in runs() if "openclaw" not in p.stem and "opencode" not in p.stem])
def test_a_request_begins_with_the_one_before(path: Path) -> None:
    """Although cache marks move and turns flip between a string and a list of blocks (openclaw rewrites its turns,
    and opencode's first request is for a title)."""
    earlier, *later = recorded(path)
    for request in later:
        before, now = earlier.conversation.messages, request.conversation.messages
        assert len(now) > len(before)
        assert all(map(same_message, before, now))
        assert same_tools(earlier.conversation.tools, request.conversation.tools)
        earlier = request
