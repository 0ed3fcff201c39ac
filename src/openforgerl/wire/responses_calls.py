"""Tool calls between the canonical form and the four kinds of Responses items.

The canonical call is what the model sees: flat name, JSON arguments. What the wire can't carry as sampled is
changed by one rule for both directions, so that an honest echo equals what `sent_call` says:

* `custom_tool_call`: plain text, see `responses_freeform`.
* `local_shell_call`: arguments that are such an action and nothing else; all others go out as a `function_call`.
* `tool_search_call`: an object as itself, all others as a string with the arguments' text. (Codex takes a search
  that comes as a `function_call` for a fatal error, but strange arguments for an empty result.)
* `function_call`: the arguments' text as the policy wrote it, JSON or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from openforgerl.conversation import nested_too_deeply, parse_arguments, plain_call_id
from openforgerl.types import JsonValue, ToolCall
from openforgerl.wire import reading
from openforgerl.wire.dialect import Head
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import present
from openforgerl.wire.responses_freeform import echoed_arguments, freeform_arguments, freeform_text
from openforgerl.wire.responses_tools import LOCAL_SHELL, TOOL_SEARCH, Kind, WireTool, flat_name

PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    Kind.FUNCTION: "fc",
    Kind.CUSTOM: "ctc",
    Kind.LOCAL_SHELL: "lsh",
    Kind.TOOL_SEARCH: "tsc",
}
"""Kind of item → how its ids begin."""

RESPONSE_PREFIX = "resp_"
_ID = re.compile(rf"({'|'.join(PREFIXES.values())})_([0-9A-Za-z]+)(?:_([0-9]+))?")
_OURS = re.compile(r"call[0-9a-f]{24}")
"""The ids of calls that our own parsers make."""


class ShellAction(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The action of a `local_shell_call` but for its type, which is always `exec`."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


def response_id(head: Head) -> str:
    """The id of an answer, by which `previous_response_id` finds it."""
    return f"{RESPONSE_PREFIX}{plain_call_id(head.call_id)}"


def item_id(kind: str, head: Head, index: int) -> str:
    """The id of an item: `index` counts items of its kind, or is that of a tool call."""
    owner = plain_call_id(head.call_id)
    numbered = kind not in ("reasoning", "message") or index > 0
    return f"{PREFIXES[kind]}_{owner}_{index}" if numbered else f"{PREFIXES[kind]}_{owner}"


def owner_of(given: JsonValue) -> tuple[str, str, int] | None:
    """Prefix, call id and index that an item's id spells, if it is of our form (others' ids may be too)."""
    found = _ID.fullmatch(given) if isinstance(given, str) else None
    if found is None or len(found.group(3) or "") > 9:
        return None
    return found.group(1), found.group(2), int(found.group(3) or 0)


def tool_of(name: str, tools: Mapping[str, WireTool]) -> WireTool:
    """How the client knows the tool of that flat name. A name that is not on offer is a function's."""
    return tools.get(name) or WireTool(kind=Kind.FUNCTION, name=name)


def sent_call(call: ToolCall, tools: Mapping[str, WireTool]) -> ToolCall:
    """The call as its echo will say it."""
    tool = tool_of(call.name, tools)
    call = msgspec.structs.replace(call, namespace=tool.namespace)
    if tool.kind is Kind.CUSTOM:
        return msgspec.structs.replace(call, arguments=echoed_arguments(call.arguments))
    return call


def call_item(call: ToolCall, tool: WireTool, head: Head, index: int, status: str) -> dict[str, JsonValue]:
    """The item of a call, number `index` of its answer. Of another kind than `tool.kind` where that can't carry it."""
    kind, carried = _carried(call.arguments, tool)
    item: dict[str, JsonValue] = {
        "type": kind.value,
        "id": item_id(kind, head, index),
        "status": status,
        "call_id": _call_id(call),
    }
    if kind in (Kind.FUNCTION, Kind.CUSTOM):
        item["name"] = tool.name
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
    if kind is Kind.TOOL_SEARCH:
        item["execution"] = "client"
    return item | carried


def _call_id(call: ToolCall) -> str:
    """An id of ours in OpenAI's own shape, `call_...`: OpenClaw writes any other anew when it echoes the call.

    Ids are compared without such characters (`conversation.plain_call_id`), so the echo is still the same call's.
    """
    return f"call_{call.id.removeprefix('call')}" if _OURS.fullmatch(call.id) else call.id


def _carried(arguments: str, tool: WireTool) -> tuple[Kind, dict[str, JsonValue]]:
    if tool.kind is Kind.CUSTOM:
        return Kind.CUSTOM, {"input": freeform_text(arguments)}
    if tool.kind is Kind.LOCAL_SHELL and (action := _action(parse_arguments(arguments))) is not None:
        return Kind.LOCAL_SHELL, {"action": {"type": "exec", **msgspec.structs.asdict(action)}}
    if tool.kind is Kind.TOOL_SEARCH:
        parsed = parse_arguments(arguments)
        return Kind.TOOL_SEARCH, {"arguments": parsed if isinstance(parsed, dict) and _fits(parsed) else arguments}
    return Kind.FUNCTION, {"arguments": arguments}


def _fits(parsed: JsonValue) -> bool:
    """Whether a request that echoes the value inside an item is not nested too deeply to be taken."""
    return not nested_too_deeply([[[parsed]]])


def _action(parsed: JsonValue) -> ShellAction | None:
    """The action that arguments spell, if they spell one and nothing else (an echo drops nulls and an empty env)."""
    try:
        action = msgspec.convert(parsed, ShellAction)
    except msgspec.ValidationError:
        return None
    return action if msgspec.to_builtins(action) == parsed else None


def read_call(item: dict[str, JsonValue], path: str, notes: Notes) -> ToolCall:
    """The canonical call of an item of one of the four kinds. WireError 400 naming the field."""
    kind = item["type"]
    given = item.get("call_id")
    if given is None and kind == Kind.LOCAL_SHELL:
        given = item.get("id")  # older payloads have no other
    call_id = reading.text(given, f"{path}.call_id")
    if kind == Kind.LOCAL_SHELL:
        return ToolCall(id=call_id, name=LOCAL_SHELL, arguments=_shell_arguments(item, path, notes))
    if kind == Kind.TOOL_SEARCH:
        given = item.get("arguments")
        arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        return ToolCall(id=call_id, name=TOOL_SEARCH, arguments=arguments)
    name = reading.text(item.get("name"), f"{path}.name")
    namespace = reading.text(item["namespace"], f"{path}.namespace") if item.get("namespace") else None
    if kind == Kind.CUSTOM:
        arguments = freeform_arguments(reading.text(item.get("input"), f"{path}.input"))
    else:
        arguments = _function_arguments(item.get("arguments"), f"{path}.arguments", notes)
    return ToolCall(id=call_id, name=flat_name(name, namespace), arguments=arguments, namespace=namespace)


def _function_arguments(value: JsonValue, path: str, notes: Notes) -> str:
    if isinstance(value, dict):
        notes.warn(f"{path} came as an object; its text is our own encoding")
        return msgspec.json.encode(value).decode()
    return "" if value is None else reading.text(value, path)


def _shell_arguments(item: dict[str, JsonValue], path: str, notes: Notes) -> str:
    action = reading.mapping(item.get("action"), f"{path}.action")
    kept = {key: value for key, value in action.items() if key != "type" and present(action, key) and value != {}}
    notes.check(kept, ShellAction.__struct_fields__, "input[].action", f"{path}.action")
    return msgspec.json.encode(kept).decode()
