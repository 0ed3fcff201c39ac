"""Gemini's field table, and how its JSON spells field names.

The API is protocol buffers in JSON: every field has a camelCase and a snake_case spelling, both are accepted, and
null is the same as absent (protocol buffers documentation, "ProtoJSON Format").
"""

from __future__ import annotations

import re
from collections.abc import Set

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import JsonValue
from openforgerl.wire import reading
from openforgerl.wire.fields import Disposition, Field, FieldTable
from openforgerl.wire.reading import bad

_UNDERSCORE = re.compile("_([a-z0-9])")


def spelled(given: dict[str, JsonValue], path: str) -> dict[str, JsonValue]:
    """`given` with its own field names in camelCase; 400 when a field is there in both spellings."""
    fields: dict[str, JsonValue] = {}
    for name, value in given.items():
        camel = _UNDERSCORE.sub(lambda found: found[1].upper(), name)
        if camel in fields:
            raise bad(f"{path}.{name}" if path else name, f"is given twice, also as `{camel}`")
        fields[camel] = value
    return fields


class Notes(msgspec.Struct):
    """What is noticed on the way; `strict` turns the first unlisted field into a 400."""

    strict: bool
    warnings: list[str]
    unlisted: list[str]

    def read(self, value: JsonValue, listed: Set[str], where: str, path: str) -> dict[str, JsonValue]:
        """The object at `path`, its field names in camelCase; fields beyond `listed` are noted.

        `where` is the path with its indices left open, so that a field is noted once.
        """
        fields = spelled(reading.mapping(value, path), path)
        for name in fields:
            if name in listed:
                continue
            if self.strict:
                raise WireError(400, "unlisted_field", f"{path}.{name}: unknown field", param=f"{path}.{name}")
            self.unlisted.append(f"{where}.{name}")
        return fields


def _honoured(name: str, note: str) -> Field:
    return Field(name, Disposition.HONOURED, note)


def _inert(note: str, *names: str) -> tuple[Field, ...]:
    return tuple(Field(name, Disposition.INERT, note) for name in names)


def _refused(name: str, note: str, *neutral: JsonValue) -> Field:
    return Field(name, Disposition.REFUSED, note, neutral)


_CONFIG = "generationConfig."
_SESSION_WINS = "recorded as asked; the session's value is what is applied"
_UNCONSTRAINED = "answers are sampled freely, without a grammar; ask for the format in the prompt"
_TEXT_ONLY = "the model writes text only"

GEMINI = FieldTable(
    "gemini",
    (
        _honoured("contents", "see Contents"),
        _honoured("systemInstruction", "a string, a Content, a part or a list of parts; text only"),
        _honoured(
            "tools",
            "`functionDeclarations`; `googleSearch`, `codeExecution`, ... are left out of the prompt and reported",
        ),
        _honoured("toolConfig", "`functionCallingConfig`, see Tools"),
        _honoured("generationConfig", "its fields stand below"),
        *_inert("recorded; the URL names the model", "model"),
        *_inert("recorded", "safetySettings", "labels", "serviceTier", "store"),
        _refused("cachedContent", "nothing is kept between requests; send the contents themselves", ""),
        _honoured(_CONFIG + "maxOutputTokens", "the smallest of request, session and context left"),
        _honoured(
            _CONFIG + "stopSequences", "a list of strings; matched in the visible text, which ends before the first"
        ),
        _honoured(
            _CONFIG + "thinkingConfig",
            "`includeThoughts`: whether thought parts are sent. How much the policy thinks is its own: "
            "`thinkingBudget` and `thinkingLevel` are recorded",
        ),
        *_inert(
            _SESSION_WINS,
            *(
                _CONFIG + name
                for name in ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "seed")
            ),
        ),
        *_inert(
            "recorded",
            *(
                _CONFIG + name
                for name in (
                    "mediaResolution",
                    "audioTimestamp",
                    "imageConfig",
                    "routingConfig",
                    "modelSelectionConfig",
                    "modelConfig",
                    "enableAffectiveDialog",
                    "enableEnhancedCivicAnswers",
                )
            ),
        ),
        _refused(_CONFIG + "candidateCount", "one answer per request; send the request again for another", 1, 0),
        _refused(_CONFIG + "responseMimeType", _UNCONSTRAINED, "text/plain", ""),
        _refused(_CONFIG + "responseSchema", _UNCONSTRAINED),
        _refused(_CONFIG + "responseJsonSchema", _UNCONSTRAINED),
        _refused(_CONFIG + "responseFormat", _UNCONSTRAINED),
        _refused(_CONFIG + "responseModalities", _TEXT_ONLY, ["TEXT"], ["text"], []),
        _refused(_CONFIG + "speechConfig", _TEXT_ONLY),
        _refused(
            _CONFIG + "responseLogprobs", "log-probabilities are recorded by the proxy, not sent to the agent", False
        ),
        _refused(_CONFIG + "logprobs", "log-probabilities are recorded by the proxy, not sent to the agent", 0),
    ),
)
"""Gemini's generateContent (Gemini API reference, "Generating content": GenerateContentRequest, GenerationConfig)."""
