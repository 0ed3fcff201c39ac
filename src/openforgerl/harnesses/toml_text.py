"""Writing TOML: what harnesses' configuration files need of it."""

from __future__ import annotations

import json

from openforgerl.types import JsonValue


def toml_text(table: dict[str, JsonValue]) -> str:
    """A document. Tables inside lists are written in line. TOML has no null: `ValueError` names its key."""
    return "".join(f"{line}\n" for line in _lines(table, ()))


def _lines(table: dict[str, JsonValue], path: tuple[str, ...]) -> list[str]:
    """A table's own values, then its tables: the order that TOML asks for."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{'.'.join(_key(part) for part in path)}]"] if path and plain else []
    lines += [f"{_key(key)} = {_value(value, (*path, key))}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _lines(value, (*path, key))
    return lines


def _key(key: str) -> str:
    bare = key and key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key, (key,))


def _value(value: JsonValue, path: tuple[str, ...]) -> str:
    if value is None:
        raise ValueError(f"{'.'.join(path)} is null, which TOML cannot say")
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_value(each, (*path, key))}" for key, each in value.items())
        return f"{{ {pairs} }}"
    if isinstance(value, list):
        return f"[{', '.join(_value(each, path) for each in value)}]"
    # JSON's true, false, numbers and strings are TOML's, but for DEL, which TOML wants escaped, and for JSON's
    # surrogate pairs, which it does not know.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
