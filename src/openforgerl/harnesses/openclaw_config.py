"""OpenClaw's own file and command lines: what a user would write to point it at a model server, and keep it quiet."""

from __future__ import annotations

import msgspec

from openforgerl.harnesses.openclaw_options import OpenclawOptions
from openforgerl.harnesses.skills import FOLDERS
from openforgerl.types import HarnessContext, JsonValue

PROVIDER = "openforgerl"
GATEWAY_PORT = 18789
"""OpenClaw's usual one; in a sandbox's own network namespace it is always free."""
APIS = {
    "chat": "openai-completions",
    "responses": "openai-responses",
    "messages": "anthropic-messages",
    "gemini": "google-generative-ai",
}
"""Our dialect → OpenClaw's name of the wire protocol."""
SPAWN = "sessions_spawn"
"""The tool that starts sub-agents."""
SETTLE = 20
"""Seconds that a gateway is left running after the task's client has ended: when sub-agents have settled, it asks
the model once more, and the client need not wait for that."""

CLIENT = """\
until (exec 3<>/dev/tcp/127.0.0.1/$PORT) 2>/dev/null; do
  [ "$SECONDS" -lt "$STARTUP" ] || { echo "the gateway's port did not open within $STARTUP s" >&2; exit 70; }
  sleep 0.5
done
"$@" && sleep "$SETTLE"
"""
"""Bash: wait for the gateway, run the client, leave the gateway time to settle."""


def config_file(*, url: str, options: OpenclawOptions, context: HarnessContext, images: bool) -> str:
    """`openclaw.json`. `url` is the proxy's base URL of the dialect; `images` whether the model can see."""
    model: dict[str, JsonValue] = {
        "id": context.model,
        "name": context.model,
        "reasoning": options.reasoning,
        "input": ["text", "image"] if images else ["text"],
        "contextWindow": context.context_length,
        "maxTokens": context.max_output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider: dict[str, JsonValue] = {
        "baseUrl": f"{url}/v1beta" if options.api == "gemini" else url,
        "api": APIS[options.api],
        "apiKey": context.key,
        "models": [model],
    }
    config: dict[str, JsonValue] = {
        "models": {
            "mode": "replace",
            "providers": {PROVIDER: provider},
            "catalogRefresh": {"enabled": False},  # else the gateway fetches a list of models
        },
        "agents": {
            "defaults": {
                "workspace": context.workdir,
                "model": {"primary": f"{PROVIDER}/{context.model}"},
                "skipBootstrap": True,
                "userTimezone": "UTC",
                "heartbeat": {"every": "0m"},  # else a model call of its own every half hour
            }
        },
        "update": {"checkOnStart": False},
        "cron": {"enabled": False},
    }
    # Named, since the state directory, where it would look by itself, is another one in `agent exec`.
    config["skills"] = {"load": {"extraDirs": [f"{context.home}/{FOLDERS['openclaw']}"]}}
    if options.tools:
        config["tools"] = {"toolSearch": False, "allow": list(options.tools)}
    if not options.plugins:
        config["plugins"] = {"enabled": False}
    if options.mode == "gateway":
        # No authentication: only the sandbox's own processes reach its loopback.
        config["gateway"] = {"mode": "local", "bind": "loopback", "port": GATEWAY_PORT, "auth": {"mode": "none"}}
    return msgspec.json.format(msgspec.json.encode(config)).decode() + "\n"


def spawns(options: OpenclawOptions) -> bool:
    """Whether the agent may start sub-agents."""
    return options.mode == "gateway" and (not options.tools or SPAWN in options.tools)
