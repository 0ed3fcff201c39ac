"""Gemini's field table, and how its JSON spells field names.

The API is protocol buffers in JSON: every field has a camelCase and a snake_case spelling, both are accepted, and
null is the same as absent (protocol buffers documentation, "ProtoJSON Format").
"""

from __future__ import annotations

import re
from collections.abc import Collection

from openforgerl.types import JsonValue
from openforgerl.wire import reading
from openforgerl.wire.fields import SESSION_WINS, UNCONSTRAINED, FieldTable, honoured, inert, refused
from openforgerl.wire.notes import Notes
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


def read(value: JsonValue, listed: Collection[str], where: str, path: str, notes: Notes) -> dict[str, JsonValue]:
    """The object at `path`, its field names in camelCase; fields beyond `listed` are noted (`Notes.check`)."""
    fields = spelled(reading.mapping(value, path), path)
    notes.check(fields, listed, where, path)
    return fields


_CONFIG = "generationConfig."
_TEXT_ONLY = "the model writes text only"

GEMINI = FieldTable(
    "gemini",
    (
        honoured("contents", "see Contents"),
        honoured("systemInstruction", "a string, a Content, a part or a list of parts; text only"),
        honoured(
            "tools",
            "`functionDeclarations`; `googleSearch`, `codeExecution`, ... are left out of the prompt and reported",
        ),
        honoured("toolConfig", "`functionCallingConfig`, see Tools"),
        honoured("generationConfig", "its fields stand below"),
        *inert("recorded; the URL names the model", "model"),
        *inert("recorded", "safetySettings", "labels", "serviceTier", "store"),
        refused("cachedContent", "nothing is kept between requests; send the contents themselves", ""),
        honoured(_CONFIG + "maxOutputTokens", "the smallest of request, session and context left"),
        honoured(
            _CONFIG + "stopSequences", "a list of strings; matched in the visible text, which ends before the first"
        ),
        honoured(
            _CONFIG + "thinkingConfig",
            "`includeThoughts`: whether thought parts are sent. How much the policy thinks is its own: "
            "`thinkingBudget` and `thinkingLevel` are recorded",
        ),
        *inert(
            SESSION_WINS,
            *(
                _CONFIG + name
                for name in ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "seed")
            ),
        ),
        *inert(
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
        refused(_CONFIG + "candidateCount", "one answer per request; send the request again for another", 1, 0),
        refused(_CONFIG + "responseMimeType", UNCONSTRAINED, "text/plain", ""),
        refused(_CONFIG + "responseSchema", UNCONSTRAINED),
        refused(_CONFIG + "responseJsonSchema", UNCONSTRAINED),
        refused(_CONFIG + "responseFormat", UNCONSTRAINED),
        refused(_CONFIG + "responseModalities", _TEXT_ONLY, ["TEXT"], ["text"], []),
        refused(_CONFIG + "speechConfig", _TEXT_ONLY),
        refused(
            _CONFIG + "responseLogprobs", "log-probabilities are recorded by the proxy, not sent to the agent", False
        ),
        refused(_CONFIG + "logprobs", "log-probabilities are recorded by the proxy, not sent to the agent", 0),
    ),
)
"""Gemini's generateContent (Gemini API reference, "Generating content": GenerateContentRequest, GenerationConfig)."""
