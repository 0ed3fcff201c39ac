"""Gemini's tools: declarations, schemas and what must be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openforgerl.errors import WireError
from openforgerl.types import ForcedCall, ToolSpec
from openforgerl.wire import Request

from .gemini_clients import GEMINI, Json


def parse(*, strict: bool = False, **fields: Any) -> Request:
    body = {"contents": [{"role": "user", "parts": [{"text": "go"}]}], **fields}
    return GEMINI.parse(json.dumps(body).encode(), strict=strict)


def refused(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def declared(**fields: Any) -> Json:
    return {"tools": [{"functionDeclarations": [{"name": "read", "description": "Reads.", **fields}]}]}


def test_a_tool_is_shown_in_the_harness_order() -> None:
    (tool,) = parse(**declared(parametersJsonSchema=SCHEMA)).conversation.tools
    assert tool == ToolSpec(
        name="read",
        description="Reads.",
        parameters=SCHEMA,
        raw={"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}},
    )
    assert tool.raw is not None
    assert list(tool.raw["function"]) == ["name", "description", "parameters"]


def test_an_openapi_schema_becomes_a_json_schema() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "any_of": {"type": "STRING", "nullable": True, "enum": ["OBJECT"]},
            "list": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "2", "max_items": 3},
            "either": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
        },
        "required": ["list"],
    }
    assert parse(**declared(parameters=given)).conversation.tools[0].parameters == {
        "type": "object",
        "properties": {
            "any_of": {"type": ["string", "null"], "enum": ["OBJECT"]},
            "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["list"],
    }


def test_one_schema_is_enough() -> None:
    error = refused(**declared(parameters=SCHEMA, parametersJsonSchema=SCHEMA))
    assert error.param == "tools[0].functionDeclarations[0].parameters"
    assert refused(tools=[{"functionDeclarations": [{"name": ""}]}]).param == "tools[0].functionDeclarations[0].name"


def test_server_side_tools_are_left_out_and_reported() -> None:
    parsed = parse(tools=[{"googleSearch": {}}, {"code_execution": {}, "functionDeclarations": [{"name": "read"}]}])
    assert [tool.name for tool in parsed.conversation.tools] == ["read"]
    assert parsed.warnings == (
        "tools[0]: server-side tool 'googleSearch' was left out of the prompt",
        "tools[1]: server-side tool 'codeExecution' was left out of the prompt",
    )


@pytest.mark.parametrize(
    ("calling", "names", "forced"),
    [
        ({}, ["a", "b"], None),
        ({"mode": "AUTO"}, ["a", "b"], None),
        ({"mode": "MODE_UNSPECIFIED"}, ["a", "b"], None),
        ({"mode": "NONE"}, [], None),
        ({"mode": "ANY"}, ["a", "b"], ForcedCall()),
        ({"mode": "any"}, ["a", "b"], ForcedCall()),
        ({"mode": "ANY", "allowedFunctionNames": ["b"]}, ["a", "b"], ForcedCall(name="b")),
        ({"mode": "ANY", "allowedFunctionNames": ["b", "c"]}, ["b", "c"], ForcedCall()),
        ({"mode": "VALIDATED"}, ["a", "b"], None),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["a"]}, ["a"], None),
    ],
)
def test_what_must_be_called(calling: Json, names: list[str], forced: ForcedCall | None) -> None:
    given = ["a", "b", *(["c"] if "c" in calling.get("allowedFunctionNames", ()) else [])]
    declarations = [{"name": name} for name in given]
    parsed = parse(
        tools=[{"functionDeclarations": declarations}], toolConfig={"functionCallingConfig": calling}, strict=True
    )
    assert [tool.name for tool in parsed.conversation.tools] == names
    assert parsed.forced == forced
    assert bool(parsed.warnings) == (calling.get("mode") == "VALIDATED")


def test_allowed_names_must_be_tools_and_need_a_mode() -> None:
    tools = [{"functionDeclarations": [{"name": "a"}]}]
    for calling, named in (
        ({"mode": "ANY", "allowedFunctionNames": ["z"]}, "[0]"),
        ({"allowedFunctionNames": ["a"]}, ""),
    ):
        error = refused(tools=tools, toolConfig={"functionCallingConfig": calling})
        assert error.param == f"toolConfig.functionCallingConfig.allowedFunctionNames{named}"
