"""What is done with every field of a request: one table per dialect (DESIGN §5 Request fields).

A needless refusal changes or kills a harness, and a silent acceptance lets a request ask for something that
the policy then does not do. So every known field has one of three dispositions, and a field that the table
does not list is recorded, warned about once and counted (`strict` refuses it).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import JsonValue
from openforgerl.wire.notes import Notes


class Disposition(enum.StrEnum):
    """What a dialect does with a field."""

    HONOURED = "honoured"
    """Does what the dialect's own documentation says, within what `note` says."""
    INERT = "inert"
    """Accepted and recorded; cannot change what the policy must do."""
    REFUSED = "refused"
    """400 naming the field, unless its value is null or one of `neutral`."""


class Field(msgspec.Struct, frozen=True):
    """One row of a table."""

    name: str
    disposition: Disposition
    note: str
    """What it does here, or why it is refused and what to do instead."""
    neutral: tuple[JsonValue, ...] = ()
    """Values that mean "off", so that a refused field may carry them."""


class FieldTable(msgspec.Struct, frozen=True):
    """All fields of one dialect's request body, by name."""

    dialect: str
    fields: tuple[Field, ...]

    def check(self, body: Mapping[str, JsonValue], notes: Notes) -> None:
        """Note what the table does not list.

        Raises WireError 400 `unsupported_field` for a refused field with a value that is not neutral, and as
        `Notes.check` does for an unlisted one.
        """
        known = {field.name: field for field in self.fields}
        for name, value in body.items():
            field = known.get(name)
            refused = field is not None and field.disposition is Disposition.REFUSED
            if field is not None and refused and not _is_neutral(value, field.neutral):
                raise WireError(400, "unsupported_field", f"{name} is not supported: {field.note}", param=name)
        notes.check(body, known)

    def markdown(self) -> str:
        """The table as it is published in the project's docs."""
        lines = ["| field | disposition | what happens | accepted all the same |", "| --- | --- | --- | --- |"]
        for field in self.fields:
            neutral = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in (None, *field.neutral))
            shown = neutral if field.disposition is Disposition.REFUSED else ""
            lines.append(f"| `{field.name}` | {field.disposition.value} | {field.note} | {shown} |")
        return "\n".join(lines) + "\n"


def _is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    # `True == 1` in Python, but `n: true` is not `n: 1`.
    return value is None or any(
        value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in neutral
    )


def honoured(name: str, note: str) -> Field:
    """A row that does what its dialect says."""
    return Field(name, Disposition.HONOURED, note)


def inert(note: str, *names: str) -> tuple[Field, ...]:
    """Rows that are accepted and change nothing, all for one reason."""
    return tuple(Field(name, Disposition.INERT, note) for name in names)


def refused(name: str, note: str, *neutral: JsonValue) -> Field:
    """A row that is a 400, but for null and the `neutral` values."""
    return Field(name, Disposition.REFUSED, note, neutral)


SESSION_WINS = "recorded as asked; the session's value is what is applied"
UNCONSTRAINED = "answers are sampled freely, without a grammar; ask for the format in the prompt"
_OWN_STOPS = "the chat template decides which tokens end a turn; use `stop`"

CHAT = FieldTable(
    "chat",
    (
        honoured("model", "recorded and echoed; every name is answered by the served model"),
        honoured(
            "messages", "roles system, developer (as system), user, assistant, tool; text, and images as `data:` URLs"
        ),
        honoured(
            "tools", "type `function`; server-side tools (`web_search`, ...) are left out of the prompt and reported"
        ),
        honoured(
            "tool_choice",
            "`auto`; `none` leaves the tools out of the prompt; `required` or a named tool: the answer opens with one",
        ),
        honoured("stream", "server-sent events, piece by piece"),
        honoured("stream_options", "`include_usage`"),
        honoured("max_tokens", "the smallest of request, session and context left"),
        honoured("max_completion_tokens", "as `max_tokens`; the smaller of the two"),
        honoured("stop", "a string or a list of strings; matched in the visible text, which ends before it"),
        *inert(
            SESSION_WINS,
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
        ),
        *inert("recorded; how much the policy thinks is its own", "reasoning_effort", "reasoning", "verbosity"),
        *inert(
            "recorded; the session's template arguments are what is applied",
            "chat_template_kwargs",
            "enable_thinking",
            "thinking",
        ),
        *inert("recorded; a turn may always carry several calls", "parallel_tool_calls"),
        *inert(
            "recorded",
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
        ),
        *inert("dropped from the prompt", "cache_control"),
        *inert("server-side tool: left out and reported", "web_search_options"),
        refused("n", "one answer per request; send the request again for another", 1),
        refused("best_of", "one answer per request; send the request again for another", 1),
        honoured("logprobs", "of every sampled token but the end of the turn; null where the engine has none"),
        refused("top_logprobs", "only the sampled tokens' own log-probabilities are known", 0),
        refused("logit_bias", "it would change the distribution that is trained", {}),
        refused("response_format", UNCONSTRAINED, {"type": "text"}),
        refused("guided_json", UNCONSTRAINED),
        refused("guided_regex", UNCONSTRAINED),
        refused("guided_choice", UNCONSTRAINED),
        refused("guided_grammar", UNCONSTRAINED),
        refused("structured_outputs", UNCONSTRAINED),
        refused("functions", "the legacy form; use `tools`", []),
        refused("function_call", "the legacy form; use `tool_choice`", "none", "auto"),
        refused("modalities", "the model writes text only", ["text"]),
        refused("audio", "the model writes text only"),
        refused("min_tokens", "it would forbid tokens that the policy may sample", 0),
        refused("ignore_eos", _OWN_STOPS, False),
        refused("stop_token_ids", _OWN_STOPS, []),
        refused("echo", "the answer never repeats the prompt", False),
        refused("continue_final_message", "the template always opens a new assistant turn", False),
        refused("add_generation_prompt", "the template always opens a new assistant turn", True),
    ),
)
"""OpenAI chat completions (API reference, "Create chat completion"), with the extensions that open servers know."""
