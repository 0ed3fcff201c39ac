"""What is done with every field of a Responses request."""

from __future__ import annotations

from openforgerl.wire.fields import SESSION_WINS, FieldTable, honoured, inert, refused

RESPONSES = FieldTable(
    "responses",
    (
        honoured("model", "recorded and echoed; every name is answered by the served model"),
        honoured("input", "a string or a list of items, see below"),
        honoured("instructions", "the first part of the leading system message; not carried over to later responses"),
        honoured(
            "previous_response_id", "a response of this session: its conversation and answer precede `input`; else 400"
        ),
        honoured(
            "tools",
            "`function`, `custom`, `namespace`, `local_shell`, `tool_search` with `execution: client`; server-side "
            "tools (`web_search`, ...) are left out of the prompt and reported",
        ),
        honoured(
            "tool_choice",
            "`auto`; `none` leaves the tools out of the prompt; `required` or a named tool forces the opening of a "
            "call; `allowed_tools` leaves the others out of the prompt; a server-side tool: 400",
        ),
        honoured("text", "`format` `text`; a JSON format is a 400; `verbosity` is recorded"),
        honoured("max_output_tokens", "the smallest of request, session and context left; the thought counts"),
        honoured("stream", "server-sent events, piece by piece"),
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
        *inert("recorded; how much the policy thinks is its own, and its thought is always shown", "reasoning"),
        *inert("recorded; `encrypted_content` is always sent, log-probabilities never", "include"),
        *inert("recorded; a turn may always carry several calls", "parallel_tool_calls"),
        *inert("recorded; answers of the session are always remembered, and nothing else is", "store"),
        *inert("recorded; an input that does not fit is always a 400, nothing is dropped", "truncation"),
        *inert("recorded; it bounds server-side tools, of which there are none", "max_tool_calls"),
        *inert("recorded; the harness compacts its own history", "context_management"),
        *inert("recorded; events carry no obfuscation, and usage is always sent", "stream_options"),
        *inert(
            "recorded; the session's template arguments are what is applied", "chat_template_kwargs", "enable_thinking"
        ),
        *inert(
            "recorded",
            "user",
            "metadata",
            "client_metadata",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "access_programs",
            "background_options",
            "image",
            "moderation",
        ),
        refused("background", "the answer is given on the connection that asked for it", False),
        refused("conversation", "conversations are not stored on the server; send `input` or `previous_response_id`"),
        refused("prompt", "prompt templates are not stored on the server; send `instructions` and `input`"),
        refused("top_logprobs", "log-probabilities are recorded by the proxy, not sent to the agent", 0),
        refused("logit_bias", "it would change the distribution that is trained", {}),
        refused("messages", "this is the Responses API; send `input`, or post to `/chat/completions`"),
    ),
)
"""OpenAI Responses (API reference, "Create a model response"), with the extensions that harnesses send."""
