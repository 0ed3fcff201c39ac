"""What a `thoughtSignature` of ours says, and how tool arguments become the object that the protocol carries.

Clients give signatures back untouched with the part that carried them, and little else: one harness drops thoughts
and puts call ids of its own, another drops ids. So each signature says which answer it belongs to and what the part
lost on the way, and with it an echoed turn is known again.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from openforgerl.conversation import nested_too_deeply, parse_arguments
from openforgerl.types import JsonValue

UNPARSED = "unparsed_arguments"
"""The one key of the object that carries a tool call's arguments when they are no JSON object."""

FOREIGN = frozenset({"skip_thought_signature_validator", "context_engineering_is_the_way_to_go"})
"""What clients put where they have no signature ("Thought signatures" in Google's documentation)."""

_PREFIX = b"ofr"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What one of our signatures says."""

    handle: str
    """The answer's handle."""
    thought: bool
    """Whether the answer began with a thought, which `Memory.reasoning` has."""
    call_id: str = ""
    """The true id of the tool call that carries it."""
    unparsed: bool = False
    """The call's arguments were no JSON object and stand under `UNPARSED`."""
    empty: str | None = None
    """The text of arguments that said nothing (`null`, blanks, nothing) and were sent as `{}`."""


def signature(mark: Mark) -> str:
    """The mark as bytes in base64, which is all that some clients give back."""
    return base64.b64encode(_PREFIX + msgspec.json.encode(mark)).decode()


def read_signature(value: str) -> Mark | None:
    """The mark in a signature of ours, None for anything else."""
    try:
        data = base64.b64decode(padded(value), validate=True)
        if not data.startswith(_PREFIX):
            return None
        return msgspec.json.decode(data[len(_PREFIX) :], type=Mark)
    except (binascii.Error, ValueError, RecursionError):
        return None


def padded(value: str) -> str:
    """Bytes in base64 as Python reads them: protocol buffers take both alphabets, with or without padding."""
    plain = value.replace("-", "+").replace("_", "/").rstrip("=")
    return plain + "=" * (-len(plain) % 4)


def sent_arguments(arguments: str) -> tuple[dict[str, JsonValue], bool, str | None]:
    """The object that carries `arguments`, and a mark's `unparsed` and `empty`.

    A JSON object is itself; arguments that say nothing are `{}`; anything else is one string under `UNPARSED`.
    """
    value = parse_arguments(arguments)
    if isinstance(value, dict) and _comes_back(value):
        return value, False, None
    if value is None and arguments.strip(" \t\r\n") in ("", "null"):
        return {}, False, arguments
    return {UNPARSED: arguments}, True, None


def received_arguments(args: dict[str, JsonValue], mark: Mark | None) -> str:
    """The text of the arguments in a call that came with `mark`: what was sampled, if the call is as we sent it."""
    if mark is not None and mark.empty is not None and not args:
        return mark.empty
    if mark is not None and mark.unparsed and list(args) == [UNPARSED]:
        text = args[UNPARSED]
        if isinstance(text, str):
            return text
    return msgspec.json.encode(args).decode()


def _comes_back(value: dict[str, JsonValue]) -> bool:
    """Whether `value` survives an echo: the request around it is not too deep, and its numbers are doubles."""
    return not nested_too_deeply({"contents": [{"parts": [{"functionCall": {"args": value}}]}]}) and _doubles(value)


def _doubles(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return all(map(_doubles, value.values()))
    if isinstance(value, list):
        return all(map(_doubles, value))
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            return False
    return True
