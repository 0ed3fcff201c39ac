"""Gemini requests: every field, every part, in both spellings."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import WireError
from openforgerl.types import ForcedCall, Image, Message, Role, Text, ToolCall
from openforgerl.wire import Address, Request
from openforgerl.wire.fields import Disposition
from openforgerl.wire.gemini_fields import GEMINI as TABLE

from .gemini_clients import GEMINI, Json

REQUESTS = Path(__file__).parent / "golden" / "gemini" / "requests"
PAGE = (Path(__file__).parents[2] / "docs" / "wire-gemini.md").read_text("utf-8")
ASK = {"role": "user", "parts": [{"text": "go"}]}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
PICTURE = Image(hashlib.sha256(PNG).hexdigest(), "image/png")
BLOB = {"mimeType": "image/png", "data": base64.b64encode(PNG).decode()}


def parse(*contents: Json, **fields: Any) -> Request:
    strict = fields.pop("strict", False)
    body = {"contents": list(contents or (ASK,)), **fields}
    return GEMINI.parse(json.dumps(body).encode(), strict=strict)


def refused(*contents: Json, **fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(*contents, **fields)
    assert caught.value.status == 400
    return caught.value


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def call(name: str, call_id: str | None = None, **args: Any) -> Json:
    return {"functionCall": {"name": name, "args": args} | ({"id": call_id} if call_id else {})}


def result(name: str, output: str, call_id: str | None = None) -> Json:
    response = {"name": name, "response": {"output": output}}
    return {"functionResponse": response | ({"id": call_id} if call_id else {})}


def config(**fields: Any) -> Json:
    return {"generationConfig": fields}


def test_the_url_says_model_and_streaming() -> None:
    body = json.dumps({"contents": [ASK], "model": "models/other"}).encode()
    parsed = GEMINI.parse(body, address=Address(model="policy", stream=True))
    assert (parsed.dialect, parsed.model, parsed.stream, parsed.include_usage) == ("gemini", "policy", True, True)
    assert (GEMINI.parse(body).model, GEMINI.parse(body).stream) == ("other", False)


def test_a_plain_conversation() -> None:
    parsed = parse(user({"text": "a"}, {"text": "b"}), model({"text": "c"}, {"text": "d"}), {"parts": [{"text": "e"}]})
    assert parsed.conversation.messages == (
        Message(role=Role.USER, parts=(Text("a"), Text("b"))),
        Message(role=Role.ASSISTANT, parts=(Text("cd"),)),
        Message(role=Role.USER, parts=(Text("e"),)),
    )
    assert (parsed.conversation.tools, parsed.forced, parsed.max_tokens, parsed.stop) == ((), None, None, ())


@pytest.mark.parametrize(
    "instruction",
    [
        "be brief",
        {"parts": [{"text": "be brief"}]},
        {"role": "user", "parts": [{"text": "be "}, {"text": ""}, {"text": "brief"}]},
        {"text": "be brief"},
        [{"text": "be brief"}],
        ["be ", {"text": "brief"}],
    ],
)
@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_a_system_instruction_in_any_spelling(name: str, instruction: Any) -> None:
    system, _ = parse(**{name: instruction}).conversation.messages
    assert (system.role, system.text) == (Role.SYSTEM, "be brief")


@pytest.mark.parametrize("instruction", ["", {"parts": []}, None])
def test_an_empty_system_instruction_is_none(instruction: Any) -> None:
    assert len(parse(systemInstruction=instruction).conversation.messages) == 1


def test_snake_case_is_the_same_request() -> None:
    snake = {
        "contents": [
            user({"text": "go"}, {"inline_data": {"mime_type": "image/png", "data": BLOB["data"]}}),
            model({"function_call": {"name": "bash", "args": {"not_a_field": 1}}, "thought_signature": ""}),
            user({"function_response": {"name": "bash", "response": {"some_key": 2}}}),
        ],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["bash"]}},
        "tools": [{"function_declarations": [{"name": "bash", "parameters_json_schema": {"a_b": 1}}]}],
        "generation_config": {"max_output_tokens": 5, "stop_sequences": ["x"], "top_p": 0.5},
    }
    parsed = GEMINI.parse(json.dumps(snake).encode(), strict=True)
    asked, called, told = parsed.conversation.messages
    assert asked.parts == (Text("go"), PICTURE)
    assert called.tool_calls == (ToolCall(id="call0", name="bash", arguments='{"not_a_field":1}'),)
    assert (told.text, told.tool_call_id) == ('{"some_key":2}', "call0")
    assert parsed.forced == ForcedCall(name="bash")
    assert parsed.conversation.tools[0].parameters == {"a_b": 1}
    assert (parsed.max_tokens, parsed.stop, parsed.asked["topP"]) == (5, ("x",), 0.5)


def test_both_spellings_of_one_field_are_refused() -> None:
    error = refused(generationConfig={}, generation_config={})
    assert (error.param, error.message) == (
        "generation_config",
        "generation_config: is given twice, also as `generationConfig`",
    )


def test_sampling_fields_are_recorded_as_asked() -> None:
    fields = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 64,
        "presencePenalty": 0.1,
        "frequencyPenalty": -0.1,
        "seed": 7,
        "maxOutputTokens": 8192,
        "stopSequences": ["END", "STOP"],
    }
    parsed = parse(**config(**fields))
    assert parsed.asked == fields
    assert (parsed.max_tokens, parsed.stop) == (8192, ("END", "STOP"))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (config(temperature="hot"), "generationConfig.temperature"),
        (config(topP=1.5), "generationConfig.topP"),
        (config(maxOutputTokens=0), "generationConfig.maxOutputTokens"),
        (config(stopSequences="x"), "generationConfig.stopSequences"),
        (config(stopSequences=["x", ""]), "generationConfig.stopSequences[1]"),
        (config(thinkingConfig=1), "generationConfig.thinkingConfig"),
        (config(thinkingConfig={"includeThoughts": "yes"}), "generationConfig.thinkingConfig.includeThoughts"),
        ({"generationConfig": []} | {"generationConfig": [1]}, "generationConfig"),
        ({"tools": {}} | {"tools": {"a": 1}}, "tools"),
        ({"systemInstruction": 5}, "systemInstruction"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
    ],
)
def test_a_malformed_field_is_named(fields: Json, path: str) -> None:
    assert refused(**fields).param == path


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("hello", "contents[0]"),
        ({"role": "system", "parts": []}, "contents[0].role"),
        (user({"text": 5}), "contents[0].parts[0].text"),
        (user({"text": "a", "inlineData": BLOB}), "contents[0].parts[0]"),
        (user({"inlineData": {"mimeType": "image/png", "data": "%%"}}), "contents[0].parts[0].inlineData"),
        (user({"inlineData": {"mimeType": "image/png"}}), "contents[0].parts[0].inlineData.data"),
        (
            user({"inlineData": {"mimeType": "application/pdf", "data": "aGk="}}),
            "contents[0].parts[0].inlineData.mimeType",
        ),
        (user({"fileData": {"fileUri": "gs://x"}}), "contents[0].parts[0].fileData"),
        (user(call("bash")), "contents[0].parts[0].functionCall"),
        (model({"functionCall": {"args": {}}}), "contents[0].parts[0].functionCall.name"),
        (model({"functionCall": {"name": "bash", "args": "ls"}}), "contents[0].parts[0].functionCall.args"),
        (model({"inlineData": BLOB}), "contents[0].parts[0].inlineData"),
        (model({"thoughtSignature": 5}), "contents[0].parts[0].thoughtSignature"),
        (user({"functionResponse": {"name": "a", "response": "x"}}), "contents[0].parts[0].functionResponse.response"),
    ],
)
def test_a_malformed_content_is_named(content: Any, path: str) -> None:
    assert refused(content).param == path


def test_contents_are_required() -> None:
    for body in ("{}", '{"contents": null}', '{"contents": []}'):
        with pytest.raises(WireError, match="contents"):
            GEMINI.parse(body.encode())


def test_results_find_their_calls_by_id_in_any_order() -> None:
    parsed = parse(
        ASK,
        model(call("bash", "x1"), call("bash", "x2")),
        user(result("bash", "two", "x2"), result("bash", "one", "x1")),
    )
    assert [(tool.tool_call_id, tool.text) for tool in parsed.conversation.messages[2:]] == [
        ("x2", "two"),
        ("x1", "one"),
    ]


def test_results_without_ids_find_the_first_open_call_of_their_name() -> None:
    parsed = parse(
        ASK,
        model(call("bash"), call("read"), call("bash")),
        user(result("bash", "first"), result("bash", "third")),
        {"role": "function", "parts": [result("read", "second")]},
    )
    calls = [given.id for given in parsed.conversation.messages[1].tool_calls]
    assert calls == ["call0", "call1", "call2"]
    answers = {tool.text: tool.tool_call_id for tool in parsed.conversation.messages[2:]}
    assert answers == {"first": "call0", "third": "call2", "second": "call1"}
    assert parsed.warnings == ()


def test_a_result_with_an_id_leaves_the_others_to_those_without() -> None:
    parsed = parse(ASK, model(call("bash", "x1"), call("bash")), user(result("bash", "b"), result("bash", "a", "x1")))
    assert [tool.tool_call_id for tool in parsed.conversation.messages[2:]] == ["call1", "x1"]


def test_ids_without_a_name_go_on_counting() -> None:
    parsed = parse(ASK, model(call("bash")), user(result("bash", "1")), model(call("bash")), user(result("bash", "2")))
    assert [tool.tool_call_id for tool in parsed.conversation.messages if tool.role is Role.TOOL] == ["call0", "call1"]


def test_a_result_that_answers_nothing_is_kept_with_a_warning() -> None:
    parsed = parse(user(result("bash", "x", "nobody")))
    (tool,) = parsed.conversation.messages
    assert (tool.role, tool.tool_call_id, tool.name) == (Role.TOOL, "nobody", "bash")
    assert parsed.warnings == ("contents[].parts[].functionResponse: a result answers no call",)


@pytest.mark.parametrize(
    ("response", "text", "is_error"),
    [
        ({"output": "hi"}, "hi", False),
        ({"output": {"a": 1}}, '{"a":1}', False),
        ({"error": "no such file"}, "no such file", True),
        ({"error": {"code": 2}}, '{"code":2}', True),
        ({"result": "x"}, '{"result":"x"}', False),
        ({"output": "x", "error": "y"}, '{"output":"x","error":"y"}', False),
        ({"error": "y", "code": 1}, '{"error":"y","code":1}', True),
        ({"error": None, "code": 1}, '{"error":null,"code":1}', False),
        ({}, "{}", False),
        (None, "", False),
    ],
)
def test_what_a_result_says(response: Any, text: str, is_error: bool) -> None:
    given = {"functionResponse": {"name": "bash", "response": response}}
    *_, tool = parse(ASK, model(call("bash")), user(given)).conversation.messages
    assert (tool.text, tool.is_error) == (text, is_error)


def test_an_image_behind_or_inside_a_result_belongs_to_it() -> None:
    inside = {"functionResponse": {"name": "read", "response": {"output": "2"}, "parts": [{"inlineData": BLOB}]}}
    parsed = parse(
        ASK,
        model(call("read"), call("read")),
        user(result("read", "1"), {"inlineData": BLOB}, inside, {"text": "look"}, {"inlineData": BLOB}),
    )
    first, second, rest = parsed.conversation.messages[2:]
    assert (first.role, first.parts) == (Role.TOOL, (Text("1"), PICTURE))
    assert (second.role, second.parts) == (Role.TOOL, (Text("2"), PICTURE))
    assert (rest.role, rest.parts) == (Role.USER, (Text("look"), PICTURE))
    assert parsed.images == {PICTURE.sha256: PNG}


def test_image_bytes_in_the_url_alphabet_without_padding() -> None:
    data = base64.urlsafe_b64encode(PNG).decode().rstrip("=")
    parsed = parse(user({"inlineData": {"mimeType": "image/png", "data": data, "displayName": "red.png"}}), strict=True)
    assert parsed.images == {PICTURE.sha256: PNG}


def test_thoughts_and_text_are_one_part_each_over_all_contents() -> None:
    parsed = parse(
        ASK,
        model({"text": "a", "thought": True}, {"text": "x"}),
        model({"text": "b", "thought": True}, {"text": "y"}, {}),
        model(),
    )
    turn = parsed.conversation.messages[1]
    assert len(parsed.conversation.messages) == 2
    assert (turn.reasoning, turn.text, len(turn.parts)) == ("ab", "xy", 2)


def test_an_empty_turn_stays_a_turn() -> None:
    parsed = parse(ASK, model(), user())
    assert [message.parts for message in parsed.conversation.messages[1:]] == [(), ()]


def test_code_that_another_server_ran_is_text() -> None:
    parsed = parse(
        ASK,
        model(
            {"executableCode": {"language": "PYTHON", "code": "print(1)"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
            {"toolCall": {"id": "t"}},
        ),
        strict=True,
    )
    assert parsed.conversation.messages[1].text == "```python\nprint(1)\n```\n```\n1\n```\n"
    assert parsed.warnings == (
        "contents[].parts[].executableCode was read as text",
        "contents[].parts[].codeExecutionResult was read as text",
        "contents[].parts[].toolCall: server-side tools were left out of the prompt",
    )


def test_a_request_to_count_may_be_wrapped() -> None:
    wrapped = {"generateContentRequest": {"model": "models/m", "contents": [ASK], "systemInstruction": "be brief"}}
    parsed = GEMINI.parse(json.dumps(wrapped).encode(), strict=True)
    assert [message.text for message in parsed.conversation.messages] == ["be brief", "go"]
    assert parsed.model == "m"
    with pytest.raises(WireError, match="cannot stand beside"):
        GEMINI.parse(json.dumps({**wrapped, "contents": [ASK]}).encode())


SAMPLE: Json = {
    "contents": [ASK],
    "systemInstruction": "x",
    "tools": [],
    "toolConfig": {},
    "generationConfig": {},
    "generationConfig.maxOutputTokens": 5,
    "generationConfig.stopSequences": ["x"],
    "generationConfig.thinkingConfig": {"thinkingBudget": -1, "thinkingLevel": "HIGH"},
    "model": "m",
    **{
        f"generationConfig.{name}": 1
        for name in ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "seed")
    },
}


@pytest.mark.parametrize("field", TABLE.fields, ids=lambda field: field.name)
def test_every_listed_field_does_what_the_table_says(field: Any) -> None:
    outer, _, inner = field.name.partition(".")

    def body(value: Any) -> Json:
        return {outer: {inner: value}} if inner else {outer: value}

    if field.disposition is Disposition.REFUSED:
        error = refused(**body({"some": "thing"}))
        assert (error.param, error.code) == (field.name, "unsupported_field")
        for neutral in (None, *field.neutral):
            parse(**body(neutral), strict=True)
    else:
        parsed = GEMINI.parse(
            json.dumps({"contents": [ASK], **body(SAMPLE.get(field.name, {"a": 1}))}).encode(), strict=True
        )
        assert parsed.unlisted == ()


@pytest.mark.parametrize(
    ("body", "where", "path"),
    [
        ({"beam": 1}, "beam", "beam"),
        (config(beam=1), "generationConfig.beam", "generationConfig.beam"),
        ({"contents": [{**ASK, "beam": 1}]}, "contents[].beam", "contents[0].beam"),
        ({"contents": [user({"text": "a", "beam": 1})]}, "contents[].parts[].beam", "contents[0].parts[0].beam"),
        ({"toolConfig": {"beam": 1}}, "toolConfig.beam", "toolConfig.beam"),
    ],
)
def test_an_unlisted_field_is_noted_and_strictly_refused(body: Json, where: str, path: str) -> None:
    data = json.dumps({"contents": [ASK], **body}).encode()
    assert GEMINI.parse(data).unlisted == (where,)
    with pytest.raises(WireError) as caught:
        GEMINI.parse(data, strict=True)
    assert (caught.value.code, caught.value.param) == ("unlisted_field", path)


@pytest.mark.parametrize("path", sorted(REQUESTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_real_harnesses_send_has_no_surprises(path: Path) -> None:
    body = path.read_bytes()
    if path.stem == "gemini-cli-router":
        # gemini-cli without `-m` asks for JSON by a schema first: docs/wire-gemini.md.
        with pytest.raises(WireError, match=r"generationConfig\.responseMimeType is not supported"):
            GEMINI.parse(body)
        return
    parsed = GEMINI.parse(body, strict=True)
    roles = "".join(message.role.value[0] for message in parsed.conversation.messages)
    assert (
        roles
        == {
            "gemini-cli-first": "su",
            "gemini-cli-after-one-call": "suat",
            "gemini-cli-after-three-calls": "suattt",
            "gemini-cli-after-bad-json": "suatat",
            "gemini-cli-count-tokens": "t",
            "gemini-cli-image": "suat",
            "gemini-cli-subagent": "suatau",
            "pi-reasoning": "suat",
        }[path.stem]
    )
    messages = parsed.conversation.messages
    calls = [given.id for message in messages for given in message.tool_calls]
    if calls:
        assert [message.tool_call_id for message in messages if message.role is Role.TOOL] == calls


def test_the_page_holds_the_table_of_the_code() -> None:
    assert TABLE.markdown() in PAGE
    assert type(TABLE)(TABLE.dialect, TABLE.fields[1:]).markdown() not in PAGE
