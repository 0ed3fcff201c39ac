"""Arguments that an answer writes as bare text: their JSON values, by the types that the tool's schema declares.

The rules follow what the model families' own reference parsers do:

* Only `string` is declared: the text, always (even `null`).
* Otherwise the first declared type that the text fits, in this order: `null` (or `None`), integer, number, boolean
  (`true`/`false` in any case), object or array (JSON, else a Python literal without
  escapes). Valid JSON keeps its own spelling.
* A text that fits no declared type stays text.
* Where the schema says nothing of the parameter, the form says whether to try JSON first or to keep the text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence

from openforgerl.conversation import parse_arguments
from openforgerl.types import JsonValue, ToolSpec

ParameterTypes = tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]
"""Tool → parameter → declared JSON types, sorted; hashable, because parsing the same answer twice is cached by it."""

_INTEGER = re.compile(r"-?\d+")
_LARGEST_LITERAL = 100_000
"""Characters of a Python literal that are still evaluated: its parser is slow and recursive."""


def types_of(tools: Sequence[ToolSpec]) -> ParameterTypes:
    """The declared types of all parameters of all tools. A tool without a usable schema has none."""
    return tuple((tool.name, _parameters(tool)) for tool in tools)


def json_of(text: str, types: Sequence[str] | None, *, untyped_json: bool) -> str:
    """The JSON text of an argument that was written as bare `text`. `types` None: the schema says nothing."""
    if types is None:
        value = _structured(text) if untyped_json else None
        return as_string(text) if value is None else value
    if tuple(types) == ("string",):
        return as_string(text)
    stripped = text.strip()
    for fits in (_null, _integer, _number, _boolean, _nested):
        value = fits(stripped, types)
        if value is not None:
            return value
    return as_string(text)


def as_string(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _null(text: str, types: Sequence[str]) -> str | None:
    # A parameter that must be something else is sent as null all the same: that is how models leave one out.
    if "string" in types and "null" not in types:
        return None
    return "null" if text.lower() == "null" or (text == "None" and "string" not in types) else None


def _integer(text: str, types: Sequence[str]) -> str | None:
    if "integer" not in types or not _INTEGER.fullmatch(text) or len(text) > 4000:
        return None
    return str(int(text))


def _number(text: str, types: Sequence[str]) -> str | None:
    if "number" not in types:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or "_" in text:
        return None
    is_json = parse_arguments(text) is not None
    return text if is_json else json.dumps(int(value) if value.is_integer() and abs(value) < 2**53 else value)


def _boolean(text: str, types: Sequence[str]) -> str | None:
    return text.lower() if "boolean" in types and text.lower() in ("true", "false") else None


def _nested(text: str, types: Sequence[str]) -> str | None:
    if "object" not in types and "array" not in types:
        return None
    value = _structured(text)
    return value if value is not None and value[0] in "{[" else None


def _structured(text: str) -> str | None:
    """JSON in its own spelling, or a Python literal as JSON."""
    text = text.strip()
    if text == "null" or parse_arguments(text) is not None:
        return text
    # Python warns of escapes that it does not know, so what a literal with one means depends on who listens.
    if not text or len(text) > _LARGEST_LITERAL or text[0] not in "{[(TFN'\"-0123456789" or "\\" in text:
        return None
    try:
        literal = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        literal.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return literal if literal == "null" or parse_arguments(literal) is not None else None


def _parameters(tool: ToolSpec) -> tuple[tuple[str, tuple[str, ...]], ...]:
    schema: JsonValue = tool.parameters
    if schema is None and tool.raw is not None:
        function = tool.raw.get("function", tool.raw)
        schema = function.get("parameters") if isinstance(function, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return ()
    found = {str(name): types for name, field in properties.items() if (types := _declared(field))}
    return tuple(sorted(found.items()))


def _declared(field: JsonValue) -> tuple[str, ...]:
    """The JSON types that a parameter's schema allows, () when it does not say."""
    if not isinstance(field, Mapping):
        return ()
    kind = field.get("type")
    found = {kind} if isinstance(kind, str) else {name for name in _items(kind) if isinstance(name, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        found |= {name for option in _items(field.get(union)) for name in _declared(option)}
    if not found:
        found = {_type_of(value) for value in _items(field.get("enum"))}
    return tuple(sorted(found))


def _items(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, list | tuple) else ()


def _type_of(value: JsonValue) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "null")
