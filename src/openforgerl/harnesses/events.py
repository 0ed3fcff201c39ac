"""Reading what harnesses print as JSON; anything else there is skipped, since agents print too."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from openforgerl.types import JsonValue


def events_of(stdout: bytes) -> Iterator[dict[str, JsonValue]]:
    """Every line that is a JSON object, in order. The first line may be a cut one: only the last bytes are kept."""
    for line in stdout.splitlines():
        event = _object(line)
        if event is not None:
            yield event


def last_object(text: bytes) -> dict[str, JsonValue] | None:
    """The JSON object or array that a program's whole output ends in (of an array: its last object), or None.

    Starts at the first line that opens one, so that warnings printed before it do no harm.
    """
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if line.lstrip().startswith((b"{", b"[")):
            try:
                value: JsonValue = msgspec.json.decode(b"".join(lines[at:]))
            except msgspec.DecodeError:
                continue
            if isinstance(value, list):
                value = next((each for each in reversed(value) if isinstance(each, dict)), None)
            return value if isinstance(value, dict) else None
    return None


def text_at(value: JsonValue, *path: str) -> str:
    """The text at a path of keys; empty where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _object(line: bytes) -> dict[str, JsonValue] | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value: JsonValue = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
