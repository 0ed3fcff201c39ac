"""Tools of a Responses request: what the model is offered, and how each one is called on the wire.

A chat template knows one kind of tool, the function. So every tool is offered as one, under a flat name
(`namespace__name` for a tool of a namespace); a `WireTool` says what a call of that name becomes for the client.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import JsonValue, ToolSpec
from openforgerl.wire import reading
from openforgerl.wire.dialect import ForcedCall, Request
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad
from openforgerl.wire.responses_freeform import PARAMETER

LOCAL_SHELL = "local_shell"
TOOL_SEARCH = "tool_search"

_WIRE_ONLY = ("type", "defer_loading", "allowed_callers", "async", "cache_control")
"""Keys of a tool that speak to the server, not to the model."""

_SHELL: dict[str, JsonValue] = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the local machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout_ms": {"type": "integer"},
            "user": {"type": "string"},
            "working_directory": {"type": "string"},
        },
        "required": ["command"],
    },
}
"""The tool `local_shell`, whose schema clients take for granted (API reference, item `local_shell_call`)."""


class Kind(enum.StrEnum):
    """What a call becomes on the wire."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    LOCAL_SHELL = "local_shell_call"
    TOOL_SEARCH = "tool_search_call"


class WireTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the client knows it."""

    kind: Kind
    name: str
    namespace: str | None = None


class Toolbox(msgspec.Struct, kw_only=True):
    """Tools in order, and the client's side of each by flat name. Of two with one name the first is called."""

    specs: list[ToolSpec] = []
    wire: dict[str, WireTool] = {}

    def add(self, spec: ToolSpec, kind: Kind, name: str) -> None:
        """One more tool."""
        self.specs.append(spec)
        self.wire.setdefault(spec.name, WireTool(kind=kind, name=name, namespace=spec.namespace))


def flat_name(name: str, namespace: str | None) -> str:
    """How the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def read_tools(value: JsonValue, path: str, notes: Notes) -> Toolbox:
    """A list of tools. WireError 400 naming the field."""
    box = Toolbox()
    for at, item in enumerate(reading.items([] if value is None else value, path)):
        _read_tool(reading.mapping(item, f"{path}[{at}]"), f"{path}[{at}]", box, notes)
    return box


def offered(raw: Mapping[str, JsonValue], notes: Notes) -> Toolbox:
    """The tools of a request: `tools`, then those that `additional_tools` items bring."""
    box = read_tools(raw.get("tools"), "tools", notes)
    for at, item in _items(raw, "additional_tools"):
        _join(box, read_tools(item.get("tools"), f"input[{at}].tools", notes))
    return box


def known_tools(request: Request) -> dict[str, WireTool]:
    """Every tool that the client of this request can be asked to call, found ones of `tool_search` too."""
    raw: JsonValue = request.raw
    if not isinstance(raw, dict):
        return {}
    box = offered(raw, Notes())
    for at, item in _items(raw, "tool_search_output"):
        if item.get("call_id") is not None:  # others were left out of the prompt, unread
            _join(box, read_tools(item.get("tools"), f"input[{at}].tools", Notes()))
    return box.wire


def _items(raw: Mapping[str, JsonValue], kind: str) -> list[tuple[int, dict[str, JsonValue]]]:
    given = raw.get("input")
    if not isinstance(given, list):
        return []
    return [(at, item) for at, item in enumerate(given) if isinstance(item, dict) and item.get("type") == kind]


def _join(box: Toolbox, more: Toolbox) -> None:
    box.specs += more.specs
    for flat, tool in more.wire.items():
        box.wire.setdefault(flat, tool)


def _read_tool(given: dict[str, JsonValue], path: str, box: Toolbox, notes: Notes) -> None:
    kind = given.get("type")
    if kind == "function":
        _function(given, path, box)
    elif kind == "custom":
        _custom(given, path, box)
    elif kind == "namespace":
        _namespace(given, path, box, notes)
    elif kind == LOCAL_SHELL:
        box.add(_spec(_SHELL, None), Kind.LOCAL_SHELL, LOCAL_SHELL)
    elif kind == TOOL_SEARCH and given.get("execution") == "client":
        _tool_search(given, path, box)
    elif isinstance(kind, str):
        notes.warn(f"{path}: server-side tool {kind!r} was left out of the prompt")
    else:
        raise bad(f"{path}.type", f"must be the kind of tool, such as `function`; got {reading.type_name(kind)}")


def _spec(shown: dict[str, JsonValue], namespace: str | None, grammar: dict[str, JsonValue] | None = None) -> ToolSpec:
    """A spec from the function that the template prints."""
    return ToolSpec(
        name=shown["name"],
        description=shown.get("description") or "",
        parameters=None if grammar is not None else shown.get("parameters"),
        grammar=grammar,
        namespace=namespace,
        raw={"type": "function", "function": shown},
    )


def _named(given: dict[str, JsonValue], path: str) -> str:
    name = reading.text(given.get("name"), f"{path}.name")
    if not name:
        raise bad(f"{path}.name", "must not be empty")
    return name


def _described(given: dict[str, JsonValue], path: str, before: str = "", after: str = "") -> str:
    """The description, which may be missing, with what stands before and after it."""
    said = given.get("description")
    own = "" if said is None else reading.text(said, f"{path}.description")
    return "\n\n".join(part for part in (before, own, after) if part)


def _function(
    given: dict[str, JsonValue], path: str, box: Toolbox, *, namespace: str | None = None, intro: str = ""
) -> None:
    name = _named(given, path)
    description = _described(given, path, intro)
    if given.get("parameters") is not None:
        reading.mapping(given["parameters"], f"{path}.parameters")
    shown = {key: value for key, value in given.items() if key not in _WIRE_ONLY}
    shown["name"] = flat_name(name, namespace)
    if intro:
        shown["description"] = description
    box.add(_spec(shown, namespace), Kind.FUNCTION, name)


def _custom(
    given: dict[str, JsonValue], path: str, box: Toolbox, *, namespace: str | None = None, intro: str = ""
) -> None:
    name = _named(given, path)
    form = given.get("format")
    grammar = {"type": "text"} if form is None else reading.mapping(form, f"{path}.format")
    after = ""
    if grammar.get("type") == "grammar":
        syntax = reading.text(grammar.get("syntax"), f"{path}.format.syntax")
        definition = reading.text(grammar.get("definition"), f"{path}.format.definition")
        after = f"`{PARAMETER}` is plain text that follows this {syntax} grammar:\n{definition}"
    elif grammar.get("type") != "text":
        raise bad(f"{path}.format.type", "must be `text` or `grammar`")
    shown: dict[str, JsonValue] = {
        "name": flat_name(name, namespace),
        "description": _described(given, path, intro, after),
        "parameters": {
            "type": "object",
            "properties": {PARAMETER: {"type": "string", "description": "The tool's whole input, as plain text."}},
            "required": [PARAMETER],
            "additionalProperties": False,
        },
    }
    box.add(_spec(shown, namespace, grammar), Kind.CUSTOM, name)


def _namespace(given: dict[str, JsonValue], path: str, box: Toolbox, notes: Notes) -> None:
    """The tools inside, under flat names. The namespace's own description precedes that of its first tool."""
    namespace = _named(given, path)
    intro = _described(given, path)
    for at, item in enumerate(reading.items(given.get("tools"), f"{path}.tools")):
        inner, where = reading.mapping(item, f"{path}.tools[{at}]"), f"{path}.tools[{at}]"
        kind = inner.get("type")
        if kind == "function":
            _function(inner, where, box, namespace=namespace, intro=intro)
        elif kind == "custom":
            _custom(inner, where, box, namespace=namespace, intro=intro)
        else:
            notes.warn(f"{where}: tool {str(kind)[:40]!r} inside a namespace was left out of the prompt")
            continue
        intro = ""


def _tool_search(given: dict[str, JsonValue], path: str, box: Toolbox) -> None:
    parameters = given.get("parameters")
    shown: dict[str, JsonValue] = {
        "name": TOOL_SEARCH,
        "description": _described(given, path),
        "parameters": {"type": "object"} if parameters is None else reading.mapping(parameters, f"{path}.parameters"),
    }
    box.add(_spec(shown, None), Kind.TOOL_SEARCH, TOOL_SEARCH)


def choose(value: JsonValue, box: Toolbox) -> tuple[Sequence[ToolSpec], ForcedCall | None]:
    """What `tool_choice` leaves on offer and forces. WireError 400 when it names what is not on offer."""
    if value is None or value == "auto":
        return box.specs, None
    if value == "none":
        # Nothing but a grammar could keep the policy from calling a tool that the prompt offers.
        return (), None
    if value == "required":
        return box.specs, _any_of(box.specs)
    if not isinstance(value, dict):
        raise bad("tool_choice", "must be `auto`, `none`, `required` or an object")
    if value.get("type") == "allowed_tools":
        return _allowed(value, box)
    flat = _find(value, box, "tool_choice")
    if flat is None:
        raise WireError(
            400,
            "unsupported_field",
            f"tool_choice: names {_spelled(value)}, which is not among the tools on offer; server-side tools are not",
            param="tool_choice",
        )
    return box.specs, ForcedCall(name=flat)


def _any_of(specs: Sequence[ToolSpec]) -> ForcedCall:
    if not specs:
        raise bad("tool_choice", "is `required`, but no tool is on offer")
    return ForcedCall()


def _allowed(value: dict[str, JsonValue], box: Toolbox) -> tuple[Sequence[ToolSpec], ForcedCall | None]:
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        raise bad("tool_choice.mode", "must be `auto` or `required`")
    named: set[str | None] = set()
    for at, item in enumerate(reading.items(value.get("tools"), "tool_choice.tools")):
        path = f"tool_choice.tools[{at}]"
        named.add(_find(reading.mapping(item, path), box, path))
    specs = [spec for spec in box.specs if spec.name in named]
    return specs, _any_of(specs) if mode == "required" else None


def _find(value: dict[str, JsonValue], box: Toolbox, path: str) -> str | None:
    """The flat name of the tool that a choice names, or None."""
    kind = value.get("type")
    if kind in (LOCAL_SHELL, TOOL_SEARCH):
        return kind if kind in box.wire else None
    if kind not in ("function", "custom"):
        return None
    name = reading.text(value.get("name"), f"{path}.name")
    namespace = value.get("namespace")
    for flat, tool in box.wire.items():
        if name in (flat, tool.name) and namespace in (None, tool.namespace):
            return flat
    return None


def _spelled(value: dict[str, JsonValue]) -> str:
    return repr(str(value.get("name") or value.get("type"))[:60])
