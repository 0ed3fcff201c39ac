"""codex's own configuration file and event stream."""

from __future__ import annotations

from openforgerl.harnesses.events import events_of, text_at
from openforgerl.harnesses.options import CodexOptions
from openforgerl.harnesses.toml_text import toml_text
from openforgerl.types import HarnessContext, JsonValue

PROVIDER = "openforgerl"
KEY_VARIABLE = "OPENFORGERL_API_KEY"
"""codex takes a provider's key from an environment variable that its configuration names."""
IDLE_MS = 1_800_000
"""How long codex waits for the next event of a stream; a slow model is no broken connection."""


def config_file(options: CodexOptions, context: HarnessContext, base_url: str) -> str:
    """`$CODEX_HOME/config.toml`. Compaction starts when a whole answer might not fit any more."""
    length = context.context_length
    config: dict[str, JsonValue] = {
        "model": context.model,
        "model_provider": PROVIDER,
        "model_context_window": length,
        "model_auto_compact_token_limit": max(length - context.max_output_tokens, length // 2),
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "model_providers": {
            PROVIDER: {
                "name": PROVIDER,
                "base_url": base_url,
                "env_key": KEY_VARIABLE,
                "wire_api": "responses",
                "stream_idle_timeout_ms": IDLE_MS,
            }
        },
        "projects": {context.workdir: {"trust_level": "trusted"}},
        "analytics": {"enabled": False},
        "features": dict[str, JsonValue](
            plugins=False,
            apps=False,
            tool_suggest=False,
            **({} if options.subagents else {"multi_agent": False}),
        )
        | options.features,
    }
    return toml_text(config)


def last_word_and_error(stdout: bytes) -> tuple[str, str | None]:
    """The model's last message, and the error that ended the run (None: there was none), from codex's events."""
    words, error = "", None
    for event in events_of(stdout):
        kind, item = event.get("type"), event.get("item")
        if kind == "item.completed" and isinstance(item, dict) and item.get("type") == "agent_message":
            words = text_at(item, "text")
        elif kind == "turn.failed":
            error = text_at(event, "error", "message")
    return words, error
