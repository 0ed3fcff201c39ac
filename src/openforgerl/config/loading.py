"""TOML files and `-s section.key=value`, merged left to right, checked strictly against the rooms' options."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from enum import EnumType
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from openforgerl.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def load_config(
    schema: type[T],
    file: Path | None,
    settings: Sequence[str],
    *,
    base: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
) -> T:
    """The config of `schema`: `base` (a verb's own defaults), then `file`, then the command line:
    `flags`, then each `section.key=value`.

    Raises ConfigError naming the file, the key and what is accepted.
    """
    tree: dict[str, Any] = dict(base or {})
    if file is not None:
        tree = _merged(tree, _read(file))
    tree = _merged(tree, flags or {})
    for setting in settings:
        tree = _merged(tree, _setting(setting))
    try:
        return msgspec.convert(tree, schema)
    except msgspec.ValidationError as error:
        where = " and ".join([*([str(file)] if file is not None else []), *(["-s"] if settings else [])]) or "settings"
        raise ConfigError(f"{where}: {error}{_hint(schema, str(error))}") from error


def resolved_json(config: msgspec.Struct) -> bytes:
    """The whole resolved config as indented JSON: what `--dry-run` prints and the run folder keeps."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _setting(setting: str) -> dict[str, Any]:
    """`a.b=value` as a tree. The value is TOML; a bare word that is not TOML is a string."""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"-s {setting!r}: write section.key=value, for example -s run.concurrency=4")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in reversed(keys):
        value = {key: value}
    return value


def _merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    merged = dict(left)
    for key, value in right.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _hint(schema: type[msgspec.Struct], message: str) -> str:
    """For an unknown key: the nearest known one, or what its section has. For an unknown word: the accepted ones."""
    at = _type_at(schema, message.partition("`$.")[2].rstrip("`"))
    if "Invalid enum value" in message:
        accepted = [str(value) for value in (*get_args(at), *(at if isinstance(at, EnumType) else ()))]
        return f" (accepted: {', '.join(accepted)})" if accepted else ""
    if "unknown field" not in message:
        return ""
    close = difflib.get_close_matches(message.split("`")[1], sorted(_known(schema)), n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(field.encode_name for field in msgspec.structs.fields(at))})" if _is_struct(at) else ""


def _type_at(schema: type[msgspec.Struct], path: str) -> Any:
    """The type of the field that `a.b` leads to; None when the path leaves the sections (into a list, say)."""
    at: Any = schema
    for name in path.split(".") if path else ():
        if not _is_struct(at):
            return None
        at = {field.encode_name: field.type for field in msgspec.structs.fields(at)}.get(name)
    return at


def _is_struct(at: Any) -> bool:
    return isinstance(at, type) and issubclass(at, msgspec.Struct)


def _known(schema: type[Any]) -> set[str]:
    names: set[str] = set()
    for field in msgspec.structs.fields(schema):
        names.add(field.encode_name)
        if _is_struct(field.type):
            names |= _known(field.type)
    return names
