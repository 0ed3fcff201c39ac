"""Responses requests: every field and item, and what a complaint names."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from openforgerl.errors import WireError
from openforgerl.types import Conversation, Image, Message, Part, Reasoning, Role, Text, ToolCall
from openforgerl.wire import Disposition, ForcedCall
from openforgerl.wire.responses_fields import RESPONSES

from .responses_client import DIALECT, PIXEL, PIXEL_BYTES, TOOLS, Remembered, ask, remembering

USER = {"role": "user", "content": "hi"}


def refused(memory: Remembered | None = None, **body: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        ask(memory, **body)
    assert caught.value.status == 400
    return caught.value


def read(*items: dict[str, Any], memory: Remembered | None = None) -> tuple[Message, ...]:
    return ask(memory, input=list(items)).conversation.messages


def user(*parts: Part) -> Message:
    return Message(role=Role.USER, parts=parts)


def assistant(*parts: Part, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(role=Role.ASSISTANT, parts=parts, tool_calls=calls)


def result(call_id: str, *parts: Part) -> Message:
    return Message(role=Role.TOOL, parts=parts, tool_call_id=call_id)


def test_a_string_is_what_the_user_says() -> None:
    assert ask(input="hello").conversation.messages == (user(Text("hello")),)
    assert ask(input="").conversation.messages == (user(),)


def test_roles_parts_and_leading_system_messages() -> None:
    messages = ask(
        instructions="Be brief.",
        input=[
            {"role": "system", "content": "A"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": ""}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "y"}, {"type": "refusal", "refusal": "z"}],
            },
            {"role": "developer", "content": "later"},
        ],
    ).conversation.messages
    leading = (Text("Be brief."), Text("\n\n"), Text("A"), Text("\n\n"), Text("B"))
    assert messages == (
        Message(role=Role.SYSTEM, parts=leading, original_role="instructions"),
        user(Text("x")),
        assistant(Text("yz")),
        Message(role=Role.SYSTEM, parts=(Text("later"),), original_role="developer"),
    )


def test_images_are_kept_by_content() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "high"}
    request = ask(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
            {"type": "function_call_output", "call_id": "k", "output": [image]},
        ]
    )
    ((name, content),) = request.images.items()
    assert len(content) == PIXEL_BYTES and name == hashlib.sha256(content).hexdigest()
    picture = Image(name, "image/png")
    assert request.conversation.messages == (user(Text("look"), picture), result("k", picture))


def test_items_of_one_turn_become_one_message() -> None:
    messages = read(
        USER,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one "}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "function_call", "call_id": "a", "name": "exec_command", "arguments": '{"cmd": "ls"'},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": 'say "hi"'},
        {
            "type": "function_call",
            "call_id": "c",
            "namespace": "multi_agent_v1",
            "name": "spawn_agent",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "a", "output": "A"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "B"}]},
        {"type": "message", "role": "assistant", "content": []},
    )
    assert messages == (
        user(Text("hi")),
        assistant(
            Text("one two"),
            calls=(
                ToolCall(id="a", name="exec_command", arguments='{"cmd": "ls"'),
                ToolCall(id="b", name="apply_patch", arguments='{"input":"say \\"hi\\""}'),
                ToolCall(id="c", name="multi_agent_v1__spawn_agent", arguments="{}", namespace="multi_agent_v1"),
            ),
        ),
        result("a", Text("A")),
        result("b", Text("B")),
        assistant(),
    )


def test_shell_and_search_items() -> None:
    messages = read(
        {
            "type": "local_shell_call",
            "call_id": "a",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None, "user": "me"},
        },
        {"type": "local_shell_call_output", "id": "a", "output": "files"},
        {"type": "local_shell_call", "id": "b", "action": {"type": "exec", "command": ["id"]}},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}},
        {
            "type": "tool_search_output",
            "call_id": "c",
            "tools": [{"type": "namespace", "name": "cal", "tools": [{"type": "function", "name": "add"}]}],
        },
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [{"type": 5}]},
    )
    assert messages == (
        assistant(calls=(ToolCall(id="a", name="local_shell", arguments='{"command":["ls","-l"],"user":"me"}'),)),
        result("a", Text("files")),
        assistant(
            calls=(
                ToolCall(id="b", name="local_shell", arguments='{"command":["id"]}'),
                ToolCall(id="c", name="tool_search", arguments='{"query":"x"}'),
            )
        ),
        result("c", Text('[{"type":"function","function":{"name":"cal__add"}}]')),
    )


def test_a_thought_counts_only_by_our_handle() -> None:
    memory = remembering()
    summary = [{"type": "summary_text", "text": "what it claims"}]
    said = {"role": "assistant", "content": "x"}
    ours = {"type": "reasoning", "summary": summary, "encrypted_content": "HANDLE"}
    thought = Reasoning("my thought", "HANDLE")
    assert read(ours, said, memory=memory) == (assistant(thought, Text("x")),)
    assert read(ours, said, ours, memory=memory) == (assistant(thought, Text("x")),)
    assert read({"type": "reasoning", "id": "rs_c7", "summary": []}, memory=memory) == (assistant(thought),)

    for foreign in (
        {**ours, "encrypted_content": "another"},
        {"type": "reasoning", "summary": summary},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}], "id": "rs_other"},
    ):
        request = ask(memory, input=[USER, foreign, said])
        assert request.conversation.messages == (user(Text("hi")), assistant(Text("x")))
        assert request.warnings == ("input: a thought that is not of this session was left out of the prompt",)
    assert refused(input=[{**ours, "encrypted_content": 5}]).param == "input[0].encrypted_content"


def test_items_by_reference() -> None:
    memory = remembering()
    ids = ["rs_c7", "msg_c7", "fc_c7_0", "fc_c7_1"]
    items = [{"type": "item_reference", "id": name} for name in ids[:2]] + [{"id": name} for name in ids[2:]]
    assert read(*items, memory=memory) == (memory.answers["c7"].messages[-1],)
    # The recorded text is one; the first message item stands for all of it.
    assert read({"id": "msg_c7"}, {"id": "msg_c7_1"}, memory=memory) == (assistant(Text("said")),)
    for unknown in ("msg_c8", "msg_7", "fc_c7_2", "c7", ""):
        assert refused(memory, input=[{"type": "item_reference", "id": unknown}]).param == "input[0].id"


def test_two_answers_in_a_row_stay_two_where_ids_tell() -> None:
    """After a cut stream Codex sends what it had of the first answer, and then the second one's items."""
    memory = remembering()
    half = {"type": "message", "role": "assistant", "id": "msg_c6", "content": "half"}
    whole = {"type": "message", "role": "assistant", "id": "msg_c7", "content": "said"}
    assert read(half, whole, memory=memory) == (assistant(Text("half")), assistant(Text("said")))
    # Ids of servers that we know nothing of may differ within one turn.
    assert read(half, whole) == (assistant(Text("halfsaid")),)
    bare = {key: value for key, value in whole.items() if key != "id"}
    assert read(half, bare, memory=memory) == (assistant(Text("halfsaid")),)


def test_a_previous_response_goes_before_the_input() -> None:
    memory = Remembered()
    first = ask(memory, instructions="Old.", input=[{"role": "system", "content": "Kept."}, USER])
    memory.answers["c1"] = Conversation(messages=(*first.conversation.messages, assistant(Text("a"))))
    second = ask(memory, previous_response_id="resp_c1", instructions="New.", input="more")
    parts = (Text("New."), Text("\n\n"), Text("Kept."))
    assert second.conversation.messages == (
        Message(role=Role.SYSTEM, parts=parts, original_role="instructions"),
        user(Text("hi")),
        assistant(Text("a")),
        user(Text("more")),
    )
    bare = ask(memory, previous_response_id="resp_c1", input=[{"role": "assistant", "content": "b"}])
    assert bare.conversation.messages == (
        Message(role=Role.SYSTEM, parts=(Text("Kept."),)),
        user(Text("hi")),
        assistant(Text("a")),
        assistant(Text("b")),
    )
    plain = ask(memory, instructions="Only.", input="x")
    memory.answers["c2"] = Conversation(messages=(*plain.conversation.messages, assistant(Text("y"))))
    assert ask(memory, previous_response_id="resp_c2", input="z").conversation.messages == (
        user(Text("x")),
        assistant(Text("y")),
        user(Text("z")),
    )
    for unknown in ("resp_c9", "c1", "", "msg_c1"):
        error = refused(memory, previous_response_id=unknown)
        assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")


def test_tools_are_offered_as_functions() -> None:
    request = ask(tools=[*TOOLS, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
    command, patch, spawn, note, shell, search = request.conversation.tools
    assert command.raw == {"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}
    assert list(command.raw["function"]) == ["name", "description", "strict", "parameters"]
    assert (patch.parameters, patch.grammar) == (None, TOOLS[1]["format"])
    assert patch.raw is not None
    assert patch.raw["function"]["parameters"]["required"] == ["input"]
    assert patch.raw["function"]["description"] == (
        "Edits files.\n\n`input` is plain text that follows this lark grammar:\nstart: begin hunk+ end"
    )
    assert (spawn.name, spawn.namespace) == ("multi_agent_v1__spawn_agent", "multi_agent_v1")
    assert spawn.description == "Sub-agents.\n\nStarts one."
    assert (note.name, note.grammar, note.description) == ("multi_agent_v1__note", {"type": "text"}, "")
    assert shell.parameters is not None and shell.parameters["required"] == ["command"]
    assert (search.name, search.description) == ("tool_search", "Finds tools.")
    assert request.warnings == (
        "tools[5]: server-side tool 'web_search' was left out of the prompt",
        "tools[6]: server-side tool 'mcp' was left out of the prompt",
    )


def test_tools_that_items_bring() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [TOOLS[0]]}
    request = ask(input=[brought, USER])
    assert [tool.name for tool in request.conversation.tools] == ["exec_command"]
    assert request.conversation.messages == (user(Text("hi")),)


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, "all", None),
        ("auto", "all", None),
        ("none", "", None),
        ("required", "all", ForcedCall()),
        ({"type": "function", "name": "exec_command"}, "all", ForcedCall(name="exec_command")),
        ({"type": "custom", "name": "apply_patch"}, "all", ForcedCall(name="apply_patch")),
        ({"type": "function", "name": "spawn_agent"}, "all", ForcedCall(name="multi_agent_v1__spawn_agent")),
        (
            {"type": "function", "namespace": "multi_agent_v1", "name": "spawn_agent"},
            "all",
            ForcedCall(name="multi_agent_v1__spawn_agent"),
        ),
        ({"type": "local_shell"}, "all", ForcedCall(name="local_shell")),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
            None,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "exec_command"}]},
            "exec_command",
            ForcedCall(),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "", None),
    ],
)
def test_tool_choice(choice: Any, names: str, forced: ForcedCall | None) -> None:
    request = ask(tools=TOOLS, tool_choice=choice)
    offered = [tool.name for tool in request.conversation.tools]
    everything = "exec_command apply_patch multi_agent_v1__spawn_agent multi_agent_v1__note local_shell tool_search"
    assert offered == (everything if names == "all" else names).split()
    assert request.forced == forced


def test_limits_streams_and_what_was_asked() -> None:
    request = ask(max_output_tokens=9.0, temperature=0.5, seed=3, stream=True, user="me")
    assert (request.max_tokens, request.stream, request.model) == (9, True, "policy")
    assert request.asked == {"temperature": 0.5, "seed": 3, "max_output_tokens": 9.0}
    assert request.raw["user"] == "me"
    assert (ask().max_tokens, ask().stream, ask(text={"verbosity": "low"}).unlisted) == (None, False, ())


def test_records_of_other_servers_are_left_out() -> None:
    request = ask(
        input=[
            USER,
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
            {
                "type": "agent_message",
                "author": "a",
                "recipient": "b",
                "content": [
                    {"type": "input_text", "text": "done"},
                    {"type": "encrypted_content", "encrypted_content": "x"},
                ],
            },
        ]
    )
    told = Message(role=Role.USER, parts=(Text("done"),), original_role="agent_message")
    assert request.conversation.messages == (user(Text("hi")), told)
    assert len(request.warnings) == 3
    for kind, field in (("compaction", "encrypted_content"), ("computer_call_output", "output"), ("new", "content")):
        error = refused(input=[USER, {"type": kind, field: "x"}])
        assert (error.code, error.param) == ("unsupported_content", "input[1].type")


def image_part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **fields}]}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": {}, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0].type",
        ),
        (image_part(file_id="file_1"), "input[0].content[0].type"),
        (image_part(image_url="https://example.org/x.png"), "input[0].content[0].image_url"),
        (image_part(image_url="data:image/png,raw"), "input[0].content[0].image_url"),
        (image_part(image_url="data:image/tiff;base64,AAAA"), "input[0].content[0].image_url"),
        (image_part(image_url="data:image/png;base64,A"), "input[0].content[0].image_url"),
        (image_part(image_url="data:image/png;base64,"), "input[0].content[0].image_url"),
        (image_part(image_url=5), "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": 5}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "a"}]}, "input[0].action"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": {}}]}, "input[0].output"),
        ({"input": [{"type": "tool_search_output", "call_id": "a", "tools": {}}]}, "input[0].tools"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "description": 5}]}, "tools[0].description"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": "x"}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"model": 5}, "model"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_a_complaint_names_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(**body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "off",
    [{"background": False}, {"top_logprobs": 0}, {"text": {"format": {"type": "text"}}}, {"logit_bias": {}}]
    + [{field.name: None} for field in RESPONSES.fields if field.name != "input"],
)
def test_a_field_that_is_off_is_never_refused(off: dict[str, Any]) -> None:
    assert ask(**off).unlisted == ()


def test_unlisted_fields_are_reported_or_refused_under_strict() -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x", "mood": 1}], "hue": 2}
    body: dict[str, Any] = {"input": [item], "shiny": 1, "text": {"size": 3}}
    assert ask(**body).unlisted == ("shiny", "input[].message.hue", "input[].content[].mood", "text.size")
    for fields, param in (
        (body, "shiny"),
        ({"input": [item]}, r"input\[0\].hue"),
        ({"text": {"size": 3}}, "text.size"),
    ):
        with pytest.raises(WireError, match=param) as caught:
            ask(strict=True, **fields)
        assert caught.value.code == "unlisted_field"


def test_each_field_is_listed_once_and_says_why() -> None:
    names = [field.name for field in RESPONSES.fields]
    assert len(names) == len(set(names))
    assert all(field.note for field in RESPONSES.fields)
    assert all(field.disposition is Disposition.REFUSED for field in RESPONSES.fields if field.neutral)


def test_bodies_that_are_no_json_object() -> None:
    for body in (b"", b"[]", b"nul", b'{"input": NaN}', b"[" * 100_000):
        with pytest.raises(WireError) as caught:
            DIALECT.parse(body)
        assert caught.value.status == 400
