"""Gemini's tools: function declarations become tool specs, and the calling config a tool that must be called."""

from __future__ import annotations

from openforgerl.errors import WireError
from openforgerl.types import ForcedCall, JsonValue, ToolSpec
from openforgerl.wire import reading
from openforgerl.wire.gemini_fields import read, spelled
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad, present

_DECLARATION = {
    "name",
    "description",
    "parameters",
    "parametersJsonSchema",
    "behavior",
    "response",
    "responseJsonSchema",
}
_CALLING = {"mode", "allowedFunctionNames", "streamFunctionCallArguments"}
_CONFIG = {"functionCallingConfig", "retrievalConfig", "includeServerSideToolInvocations"}
_MODES = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")

_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
"""Schema fields that are 64-bit integers, which protocol buffers write as strings."""


def tools(body: dict[str, JsonValue], notes: Notes) -> tuple[tuple[ToolSpec, ...], ForcedCall | None]:
    """The tools on offer, and the call that the answer must open with."""
    offered: list[ToolSpec] = []
    for at, item in enumerate(reading.items(body.get("tools") or [], "tools")):
        path = f"tools[{at}]"
        for name, value in spelled(reading.mapping(item, path), path).items():
            if value is None:
                continue
            if name == "functionDeclarations":
                where = f"{path}.{name}"
                offered += [
                    _declaration(given, f"{where}[{index}]", notes)
                    for index, given in enumerate(reading.items(value, where))
                ]
            else:
                notes.warn(f"{path}: server-side tool {name!r} was left out of the prompt")
    return _chosen(tuple(offered), body, notes)


def _declaration(value: JsonValue, path: str, notes: Notes) -> ToolSpec:
    given = read(value, _DECLARATION, "tools[].functionDeclarations[]", path, notes)
    name = reading.text(given.get("name"), f"{path}.name")
    if not name:
        raise bad(f"{path}.name", "must not be empty")
    if present(given, "parameters") and present(given, "parametersJsonSchema"):
        raise bad(f"{path}.parameters", "cannot stand beside `parametersJsonSchema`; give one of them")
    shown: dict[str, JsonValue] = {}
    for key, item in given.items():
        if item is None:
            continue
        if key == "name":
            shown["name"] = name
        elif key == "description":
            shown["description"] = reading.text(item, f"{path}.description")
        elif key == "parameters":
            shown["parameters"] = _json_schema(reading.mapping(item, f"{path}.parameters"))
        elif key == "parametersJsonSchema":
            shown["parameters"] = reading.mapping(item, f"{path}.parametersJsonSchema")
    return ToolSpec(
        name=name,
        description=shown.get("description", ""),
        parameters=shown.get("parameters"),
        raw={"type": "function", "function": shown},
    )


def _json_schema(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """An OpenAPI schema as the JSON schema that chat templates are trained on: the same, spelled differently."""
    given = spelled(schema, "parameters")
    nullable = given.pop("nullable", None) is True
    shown: dict[str, JsonValue] = {}
    for name, value in given.items():
        if name == "type" and isinstance(value, str):
            shown[name] = [value.lower(), "null"] if nullable else value.lower()
        elif name == "properties" and isinstance(value, dict):
            shown[name] = {key: _inner(item) for key, item in value.items()}
        elif name in ("items", "additionalProperties"):
            shown[name] = _inner(value)
        elif name in ("anyOf", "prefixItems") and isinstance(value, list):
            shown[name] = [_inner(item) for item in value]
        elif name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            shown[name] = int(value)
        else:
            shown[name] = value
    return shown


def _inner(value: JsonValue) -> JsonValue:
    return _json_schema(value) if isinstance(value, dict) else value


def _chosen(
    offered: tuple[ToolSpec, ...], body: dict[str, JsonValue], notes: Notes
) -> tuple[tuple[ToolSpec, ...], ForcedCall | None]:
    """What `toolConfig` leaves of the tools, and the call that it asks for."""
    path = "toolConfig.functionCallingConfig"
    config = read(body.get("toolConfig") or {}, _CONFIG, "toolConfig", "toolConfig", notes)
    calling = read(config.get("functionCallingConfig") or {}, _CALLING, path, path, notes)
    mode = calling.get("mode") or "AUTO"
    if not isinstance(mode, str) or mode.upper() not in _MODES:
        raise bad(f"{path}.mode", f"must be one of {', '.join(_MODES)}; got {mode!r}")
    mode = mode.upper()
    listed = reading.items(calling.get("allowedFunctionNames") or [], f"{path}.allowedFunctionNames")
    allowed = [reading.text(name, f"{path}.allowedFunctionNames[{at}]") for at, name in enumerate(listed)]
    known = {tool.name for tool in offered}
    for at, name in enumerate(allowed):
        if name not in known:
            raise bad(f"{path}.allowedFunctionNames[{at}]", f"no tool is called {name!r}")
    if mode == "NONE":
        # Nothing but a grammar could keep the policy from calling a tool that the prompt offers.
        return (), None
    if mode == "VALIDATED":
        notes.warn(f"{path}.mode: VALIDATED was read as AUTO; arguments are not held to their schema")
    if allowed and mode in ("AUTO", "MODE_UNSPECIFIED"):
        raise WireError(
            400,
            "invalid_request",
            f"{path}.allowedFunctionNames: needs mode ANY or VALIDATED",
            param=f"{path}.allowedFunctionNames",
        )
    if mode == "ANY" and not offered:
        raise bad(f"{path}.mode", "ANY needs `tools` with a function to call")
    if mode == "ANY" and len(set(allowed)) == 1:
        return offered, ForcedCall(name=allowed[0])
    kept = tuple(tool for tool in offered if not allowed or tool.name in allowed)
    return kept, ForcedCall() if mode == "ANY" else None
