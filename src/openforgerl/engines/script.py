"""The answers a scripted engine gives: the file format and which entry answers which prompt.

::

    {"answers": [{"match"?: regex, "times"?: n,
                  "text"? "reasoning"? "tool_calls"? | "raw" | "token_ids",
                  "finish_reason"?, "delay_s"?, "chunk_tokens"?, "cut_after_tokens"?,
                  "error"?: {"status", "retry_after"?}}]}
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import msgspec

from openforgerl.errors import InputError
from openforgerl.types import JsonValue, Message, Reasoning, Role, Text, ToolCall


class ScriptedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI spelling of a tool call's inside."""

    name: str
    arguments: JsonValue = {}


class ScriptedToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call to write: `{"name", "arguments"}`, or OpenAI's `{"type", "function": {"name", "arguments"}}`."""

    name: str | None = None
    arguments: JsonValue = None
    """An object (written as JSON by the template) or a string (written as it stands, also when it is no JSON)."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: ScriptedFunction | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.function is None):
            raise ValueError("a tool call has `name` and `arguments`, or `function`, not both")


class ScriptedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fail instead of answering: 429 as `EngineOverloaded`, everything else as `EngineError`."""

    status: int
    retry_after: float | None = None
    """Seconds until the client may come back; for status 429 the default is 1."""

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ValueError(f"`status` must be an HTTP error status, 400 to 599; got {self.status}")
        if self.retry_after is not None and self.retry_after < 0:
            raise ValueError("`retry_after` must be 0 or more")


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a script."""

    match: str | None = None
    """Regular expression, searched in the text of the prompt's last message that has any; absent = fits every
    prompt."""
    times: int | None = 1
    """How often one session may use the entry; 0 or null = without end."""
    text: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ScriptedToolCall, ...] = ()
    """`text`, `reasoning` and `tool_calls` combine into one assistant turn, written by the chat template."""
    raw: str | None = None
    """Encoded without the template, added tokens as structure; the stop token is put at its end when missing."""
    token_ids: tuple[int, ...] | None = None
    """Emitted as they are."""
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    """`tool_calls` means `stop`. `length` leaves the stop token out. Absent: `stop` when the ids end in a stop
    token, else `length`."""
    delay_s: float = 0.0
    """Seconds waited before every chunk."""
    chunk_tokens: int = 1
    """Ids per chunk."""
    cut_after_tokens: int | None = None
    """The stream breaks with an `EngineError` after so many ids."""
    error: ScriptedError | None = None

    def __post_init__(self) -> None:
        forms = {
            "text, reasoning or tool_calls": self.has_message,
            "raw": self.raw is not None,
            "token_ids": self.token_ids is not None,
            "error": self.error is not None,
        }
        given = [name for name, present in forms.items() if present]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of `text`/`reasoning`/`tool_calls`, `raw`, `token_ids`, `error`; got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.match is not None:
            try:
                re.compile(self.match)
            except re.error as error:
                raise ValueError(f"`match`: bad regex {self.match!r}: {error}") from error
        checks = (
            (self.times is None or self.times >= 0, "times", "0 (without end) or more"),
            (0 <= self.delay_s < float("inf"), "delay_s", "0 or more seconds"),
            (self.chunk_tokens >= 1, "chunk_tokens", "1 or more"),
            (self.cut_after_tokens is None or self.cut_after_tokens >= 0, "cut_after_tokens", "0 or more"),
            (self.token_ids is None or min(self.token_ids, default=0) >= 0, "token_ids", "ids of 0 or more"),
        )
        for good, name, accepted in checks:
            if not good:
                raise ValueError(f"`{name}` must be {accepted}; got {getattr(self, name)!r}")

    @property
    def has_message(self) -> bool:
        """Whether the answer is written by the chat template."""
        return self.text is not None or self.reasoning is not None or bool(self.tool_calls)

    def message(self) -> Message:
        """The assistant turn of a `text`/`reasoning`/`tool_calls` entry."""
        parts = (*((Reasoning(self.reasoning),) if self.reasoning else ()), *((Text(self.text),) if self.text else ()))
        calls = tuple(_tool_call(call, index) for index, call in enumerate(self.tool_calls))
        return Message(role=Role.ASSISTANT, parts=parts, tool_calls=calls)


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers in order of preference."""

    answers: tuple[Answer, ...]

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read a script file. Raises InputError naming file, entry and field."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"script {path}: {error.strerror or error}") from error
        return cls.decode(data, name=str(path))

    @classmethod
    def decode(cls, data: bytes | str, *, name: str = "script") -> Script:
        """A script from JSON. Raises InputError naming entry and field (`answers[3].match: ...`)."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{name}: {_located(str(error))}") from error
        except msgspec.DecodeError as error:
            raise InputError(f"{name}: not JSON: {error}") from error


def _located(message: str) -> str:
    """msgspec's `text - at `$.answers[3]`` as `answers[3]: text`; a field named in the text joins the path."""
    text, marker, place = message.partition(" - at `$.")
    if not marker:
        return message
    place = place.rstrip("`")
    field = re.match(r"`(\w+)`:? ", text)
    if field is not None:
        return f"{place}.{field[1]}: {text[field.end() :]}"
    return f"{place}: {text}"


def _tool_call(call: ScriptedToolCall, index: int) -> ToolCall:
    name, arguments = (call.name, call.arguments) if call.function is None else _inside(call.function)
    return ToolCall(id=call.id or f"call{index}", name=name or "", arguments=_argument_text(arguments))


def _inside(function: ScriptedFunction) -> tuple[str, JsonValue]:
    return function.name, function.arguments


def _argument_text(arguments: JsonValue) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
