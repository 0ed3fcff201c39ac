"""ZeroClaw's own file (config format 3), as its documentation and source say it.

Every setting that differs from ZeroClaw's default does so because the default ends or changes long runs: few
iterations and actions, short time limits, a loop detector that edits the system prompt, a list of forbidden folders.
"""

from __future__ import annotations

from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.toml_text import toml_text
from openforgerl.types import HarnessContext, JsonValue

ALIAS = "rl"
"""Our name for the provider, the profiles and the agent in its file."""
BUNDLE = "task"
"""The bundle of MCP servers that the agent gets; a server in no bundle is not used."""
SLOTS = {"chat": "vllm", "responses": "openai", "messages": "anthropic"}
"""Our dialect → the provider slot that speaks it with native tool calls."""
UNLIMITED = 4_294_967_295
"""The largest number of actions per hour that it takes; 0 would block everything."""


def config_file(options: HarnessOptions, context: HarnessContext, url: str) -> str:
    """`config.toml`. `url` is the proxy's base URL of the dialect. Lengths in tokens, times in seconds."""
    chosen = options.zeroclaw
    slot = SLOTS[chosen.api]
    provider: dict[str, JsonValue] = {
        "uri": url,
        "api_key": context.key,
        "model": context.model,
        "timeout_secs": chosen.call_timeout,
    }
    if chosen.api == "chat":
        provider["vision"] = options.images
    if chosen.api == "responses":
        provider["wire_api"] = "responses"
    if chosen.api == "messages":
        provider["max_tokens"] = context.max_output_tokens  # else 4096
    risk: dict[str, JsonValue] = {
        "level": "full",
        "allowed_commands": ["*"],
        "block_high_risk_commands": False,
        "forbidden_paths": [],
        "sandbox_enabled": False,
        "allowed_tools": list(chosen.tools),
    }
    runtime: dict[str, JsonValue] = {
        "max_tool_iterations": chosen.max_iterations,
        "max_actions_per_hour": UNLIMITED,
        "max_context_tokens": 0,  # no trimming of its own: the proxy says when the context is full
        "shell_timeout_secs": chosen.command_timeout,
    }
    agent: dict[str, JsonValue] = {
        "model_provider": f"{slot}.{ALIAS}",
        "risk_profile": ALIAS,
        "runtime_profile": ALIAS,
        **({"mcp_bundles": [BUNDLE]} if chosen.servers else {}),
        "workspace": {"path": context.workdir},
        "memory": {"backend": "none"},
    }
    config: dict[str, JsonValue] = {
        "schema_version": 3,
        "providers": {"models": {slot: {ALIAS: provider}}},
        "risk_profiles": {ALIAS: risk},
        "runtime_profiles": {ALIAS: runtime},
        "agents": {ALIAS: agent},
        "memory": {"auto_save": False},
        "reliability": {"provider_retries": 8, "provider_backoff_ms": 1000},
        "pacing": {"loop_detection_enabled": False},
        "cost": {"enabled": False},
        "skills": {"open_skills_enabled": False},
        "http_request": {"allow_private_hosts": True},
        "observability": {"log_persistence": "none"},
    }
    if chosen.servers:
        servers: list[JsonValue] = [
            {
                "name": name,
                "transport": "stdio",
                "command": server.command,
                "args": list(server.args),
                "env": {**server.env},
                "tool_timeout_secs": server.timeout,
            }
            for name, server in chosen.servers.items()
        ]
        config["mcp"] = {"servers": servers}
        config["mcp_bundles"] = {BUNDLE: {"servers": list(chosen.servers)}}
    return toml_text(config)
