"""What is done with every field of an Anthropic Messages request: the table of the dialect `messages`."""

from __future__ import annotations

from openforgerl.wire.fields import FieldTable, honoured, inert, refused

MESSAGES = FieldTable(
    "messages",
    (
        honoured("model", "recorded and echoed; every name is answered by the served model"),
        honoured("system", "a string or a list of text blocks, joined without a separator"),
        honoured("messages", "roles user, assistant and system; the blocks are listed below"),
        honoured(
            "tools",
            "tools with an `input_schema`; server tools (`web_search_*`, ...) are left out of the prompt and reported; "
            "`bash_*`, `text_editor_*`, `computer_*`, `memory_*`, `browser_*`: 400",
        ),
        honoured(
            "tool_choice",
            "`auto`; `none` leaves the tools out of the prompt; `any` and `tool` open the answer with a call, which "
            "makes it off-policy; `disable_parallel_tool_use` is inert",
        ),
        honoured("stream", "server-sent events, piece by piece"),
        honoured("max_tokens", "the smallest of request, session and context left; may be absent; 0 is refused"),
        honoured("stop_sequences", "matched in the visible text, which ends before the first one"),
        honoured(
            "thinking",
            "`display: omitted` keeps the thought's text out of the answer; how much the policy thinks is its own",
        ),
        honoured("output_config", "`effort` and `task_budget` are recorded; `format`: 400, answers are sampled freely"),
        *inert("recorded as asked; the session's value is what is applied", "temperature", "top_p", "top_k"),
        *inert(
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
        *inert("recorded; the prompt is always the whole conversation that was sent", "context_management"),
        *inert("recorded; no server-side tool runs in it", "container"),
        *inert("dropped from the prompt", "cache_control"),
        refused("mcp_servers", "the proxy calls no servers; offer their tools in `tools`", []),
        refused("output_format", "answers are sampled freely, without a grammar; ask for the format in the prompt"),
    ),
)
"""Anthropic Messages (API reference, "Create a Message", with its beta fields)."""
