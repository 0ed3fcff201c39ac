"""What is done with every field of an Anthropic Messages request: the table of the dialect `messages`."""

from __future__ import annotations

from openforgerl.types import JsonValue
from openforgerl.wire.fields import Disposition, Field, FieldTable


def _honoured(name: str, note: str) -> Field:
    return Field(name, Disposition.HONOURED, note)


def _inert(note: str, *names: str) -> tuple[Field, ...]:
    return tuple(Field(name, Disposition.INERT, note) for name in names)


def _refused(name: str, note: str, *neutral: JsonValue) -> Field:
    return Field(name, Disposition.REFUSED, note, neutral)


MESSAGES = FieldTable(
    "messages",
    (
        _honoured("model", "recorded and echoed; every name is answered by the served model"),
        _honoured("system", "a string or a list of text blocks, joined without a separator"),
        _honoured("messages", "roles user, assistant and system; the blocks are listed below"),
        _honoured(
            "tools",
            "tools with an `input_schema`; server tools (`web_search_*`, ...) are left out of the prompt and reported; "
            "`bash_*`, `text_editor_*`, `computer_*`, `memory_*`, `browser_*`: 400",
        ),
        _honoured(
            "tool_choice",
            "`auto`; `none` leaves the tools out of the prompt; `any` and `tool` open the answer with a call, which "
            "makes it off-policy; `disable_parallel_tool_use` is inert",
        ),
        _honoured("stream", "server-sent events, piece by piece"),
        _honoured("max_tokens", "the smallest of request, session and context left; may be absent; 0 is refused"),
        _honoured("stop_sequences", "matched in the visible text, which ends before the first one"),
        _honoured(
            "thinking",
            "`display: omitted` keeps the thought's text out of the answer; how much the policy thinks is its own",
        ),
        _honoured(
            "output_config", "`effort` and `task_budget` are recorded; `format`: 400, answers are sampled freely"
        ),
        *_inert("recorded as asked; the session's value is what is applied", "temperature", "top_p", "top_k"),
        *_inert(
            "recorded",
            "metadata",
            "service_tier",
            "speed",
            "inference_geo",
            "diagnostics",
            "fallbacks",
            "fallback_credit_token",
            "user_profile_id",
            "betas",
            "anthropic_beta",
            "anthropic_version",
        ),
        *_inert("recorded; the prompt is always the whole conversation that was sent", "context_management"),
        *_inert("recorded; no server-side tool runs in it", "container"),
        *_inert("dropped from the prompt", "cache_control"),
        _refused("mcp_servers", "the proxy calls no servers; offer their tools in `tools`", []),
        _refused("output_format", "answers are sampled freely, without a grammar; ask for the format in the prompt"),
    ),
)
"""Anthropic Messages (API reference, "Create a Message", with its beta fields)."""
