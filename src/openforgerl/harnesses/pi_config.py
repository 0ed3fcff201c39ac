"""pi's own files and command line: what a user of pi would write to point it at a model server."""

from __future__ import annotations

import msgspec

from openforgerl.harnesses.options import PiOptions
from openforgerl.types import JsonValue

PROVIDER = "openforgerl"
MODEL = "policy"
"""The model's name inside pi; it shows up in requests as `model`."""
ENTRY = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
"""What npm's `pi` link points to."""
SAFETY_TOKENS = 4096
"""pi keeps this many tokens of the context window free before it sizes an answer (pi-ai `simple-options`).
The window we announce is larger by as much, so that pi uses the true one; the proxy enforces the true one."""


APIS = {
    "chat": "openai-completions",
    "responses": "openai-responses",
    "messages": "anthropic-messages",
    "gemini": "google-generative-ai",
}
"""Dialect → pi's name for it."""
GEMINI_VERSION = "/v1beta"
"""pi wants the API's version in a Gemini base URL, and in no other."""


def models_file(
    *,
    base_url: str,
    key: str,
    context_length: int,
    max_output_tokens: int,
    dialect: str = "chat",
    images: bool = False,
) -> str:
    """`~/.pi/agent/models.json`. Lengths in tokens; `base_url` as the dialect's own clients take it."""
    model: dict[str, JsonValue] = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": False,
        "input": ["text", "image"] if images else ["text"],
        "contextWindow": context_length + SAFETY_TOKENS,
        "maxTokens": max_output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    url = base_url + GEMINI_VERSION if dialect == "gemini" else base_url
    provider: dict[str, JsonValue] = {"baseUrl": url, "api": APIS[dialect], "apiKey": key, "models": [model]}
    return _text({"providers": {PROVIDER: provider}})


def settings_file(*, context_length: int, max_output_tokens: int) -> str:
    """`~/.pi/agent/settings.json`: compaction starts when the next answer might not fit any more."""
    compaction: dict[str, JsonValue] = {
        "enabled": True,
        "reserveTokens": SAFETY_TOKENS + max_output_tokens,
        "keepRecentTokens": min(20_000, context_length // 4),
    }
    return _text({"compaction": compaction})


def arguments(options: PiOptions, instruction: str) -> tuple[tuple[str, ...], str]:
    """pi's arguments after the program, and its standard input.

    The instruction is the last argument, as users give it. pi takes an argument that starts with `@` for a
    file, and the kernel refuses very long ones: such an instruction goes through standard input instead.
    """
    argv: list[str] = ["-p", "--no-session", "--provider", PROVIDER, "--model", MODEL]
    if options.tools:
        argv += ["--tools", ",".join(options.tools)]
    if options.system_prompt is not None:
        argv += ["--system-prompt", options.system_prompt]
    argv += options.extra_arguments
    if instruction.startswith("@") or len(instruction.encode()) > 100_000:
        return tuple(argv), instruction
    return (*argv, "--", instruction), ""


def _text(value: JsonValue) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
