"""Gemini's generateContent, both ways (Gemini API reference, "Generating content" and "Counting tokens").

The URL names the model and whether to stream. The protocol has no ids that clients keep and carries arguments as
objects only; what is lost that way stands in the signatures (`gemini_marks`).
"""

from __future__ import annotations

from collections.abc import Sequence

from openforgerl.errors import WireError
from openforgerl.types import Conversation, JsonValue, Message
from openforgerl.wire import reading
from openforgerl.wire.dialect import (
    BODY_ALONE,
    NOTHING_YET,
    Address,
    Answer,
    Head,
    Memory,
    Request,
    StreamWriter,
)
from openforgerl.wire.gemini_answers import GeminiStream, error_body, models_body, whole_body
from openforgerl.wire.gemini_contents import Reader
from openforgerl.wire.gemini_fields import GEMINI, read, spelled
from openforgerl.wire.gemini_tools import tools
from openforgerl.wire.notes import Notes
from openforgerl.wire.reading import bad, present

_ASKED: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "topP": (0, 1),
    "topK": (-1, 1e9),
    "presencePenalty": (-1e3, 1e3),
    "frequencyPenalty": (-1e3, 1e3),
    "seed": (-(2.0**64), 2.0**64),
}
"""Sampling fields that are recorded as asked: name → accepted range."""

_THINKING = {"includeThoughts", "thinkingBudget", "thinkingLevel"}


class GeminiDialect:
    """The dialect `gemini`."""

    name = "gemini"
    cut_after_failure = False
    """Google's own readers look for the error in a piece of its own; where they find it behind another, only a stream
    that ends there fails (`Incomplete JSON segment`, which Gemini CLI tries again for, other than for a cut)."""

    def parse(
        self, body: bytes, *, strict: bool = False, address: Address = BODY_ALONE, memory: Memory = NOTHING_YET
    ) -> Request:
        """The request in `body`. Raises WireError 400 naming the field and what is accepted."""
        raw, warnings = reading.decode_object(body, memory.rereading)
        given = _unwrapped(spelled(raw, ""))
        config = _config(given)
        flat = given | {f"generationConfig.{name}": value for name, value in config.items()}
        notes = Notes(strict=strict, warnings=warnings)
        GEMINI.check(flat, notes)
        _includes_thoughts(config, notes)
        offered, forced = tools(given, notes)
        reader = Reader(memory, notes)
        if present(given, "systemInstruction"):
            reader.system(given["systemInstruction"])
        if not present(given, "contents"):
            raise bad("contents", "is required: a list of contents")
        reader.contents(given["contents"])
        return Request(
            dialect=self.name,
            model=address.model or _model(given),
            conversation=Conversation(messages=tuple(reader.messages), tools=offered),
            stream=bool(address.stream),
            include_usage=True,
            max_tokens=_most(config),
            stop=reading.stop_strings(config.get("stopSequences"), "generationConfig.stopSequences"),
            forced=forced,
            images=notes.images,
            asked=_asked(config),
            raw=raw,
            unlisted=notes.unlisted,
            warnings=notes.warnings,
        )

    def sent(self, message: Message, request: Request) -> Message:
        """The message itself: what the protocol cannot carry comes back with the signatures."""
        return message

    def writer(self, head: Head, request: Request) -> StreamWriter:
        """A writer of events that are each a GenerateContentResponse."""
        return GeminiStream(head, thoughts=_thoughts(request))

    def whole(self, head: Head, request: Request, answer: Answer) -> dict[str, JsonValue]:
        """A GenerateContentResponse."""
        return whole_body(head, answer, thoughts=_thoughts(request))

    def counted(self, tokens: int) -> dict[str, JsonValue]:
        """The answer of `:countTokens`."""
        return {"totalTokens": tokens}

    def status(self, error: WireError) -> int:
        """The error's own."""
        return error.status

    def error(self, error: WireError) -> dict[str, JsonValue]:
        """A google.rpc.Status under `error`."""
        return error_body(error)

    def models(self, names: Sequence[str]) -> dict[str, JsonValue]:
        """The answer of `/v1beta/models`."""
        return models_body(names)


def _unwrapped(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The request inside `generateContentRequest`, where `:countTokens` may have it whole."""
    if not present(given, "generateContentRequest"):
        return given
    path = "generateContentRequest"
    if present(given, "contents"):
        raise bad("contents", f"cannot stand beside `{path}`; give one of them")
    return spelled(reading.mapping(given[path], path), path)


def _config(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    path = "generationConfig"
    return spelled(reading.mapping(given.get(path) or {}, path), path)


def _includes_thoughts(config: dict[str, JsonValue], notes: Notes) -> bool:
    path = "generationConfig.thinkingConfig"
    thinking = read(config.get("thinkingConfig") or {}, _THINKING, path, path, notes)
    return reading.flag(thinking.get("includeThoughts") or False, f"{path}.includeThoughts")


def _thoughts(request: Request) -> bool:
    """Whether thought parts are sent; the request was read before, so what is noted here was noted then."""
    given = _unwrapped(spelled(request.raw or {}, ""))
    return _includes_thoughts(_config(given), Notes())


def _model(given: dict[str, JsonValue]) -> str:
    return reading.text(given.get("model") or "", "model").removeprefix("models/")


def _most(config: dict[str, JsonValue]) -> int | None:
    name = "maxOutputTokens"
    return reading.count(config[name], f"generationConfig.{name}") if present(config, name) else None


def _asked(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    asked = reading.numbers(config, _ASKED, under="generationConfig.")
    for name in ("maxOutputTokens", "stopSequences"):
        if present(config, name):
            asked[name] = config[name]
    return asked
