"""opencode (`opencode-ai`), unmodified: `opencode run`, one instruction, every permission granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.harnesses.events import events_of, text_at
from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

PROVIDER = "openforgerl"
SDKS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
"""Dialect → the provider SDK, bundled in opencode, that speaks it."""


class OpencodeHarness:
    """Adapter."""

    name = "opencode"

    def __init__(self, options: HarnessOptions | None = None, *, machine: str | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.opencode
        self._images = chosen.images
        self._package = InstalledPackage(self.name, chosen, machine=machine)

    @property
    def dialect(self) -> str:
        """As `harness.opencode.api` says."""
        return self._options.api

    def layers(self) -> Sequence[Layer]:
        """opencode, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """opencode.json, and `opencode run` with the instruction on standard input.

        As an argument, opencode puts an instruction of several words between quotation marks.
        """
        url = base_url(context, self.name, self.dialect)
        if self.dialect == "messages":
            url = f"{url}/v1"  # its Anthropic SDK adds /messages alone
        home = context.home
        return Plan(
            argv=(*self._package.program(), "run", "--format", "json", *self._options.extra_arguments),
            files={f"{home}/.config/opencode/opencode.json": self._config(context, url)},
            env={
                "PATH": PATH,
                "HOME": home,
                "LANG": "C.UTF-8",
                "XDG_CONFIG_HOME": f"{home}/.config",
                "XDG_DATA_HOME": f"{home}/.local/share",
                "XDG_CACHE_HOME": f"{home}/.cache",
                "XDG_STATE_HOME": f"{home}/.local/state",
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            },
            stdin=context.task.instruction,
        )

    def _config(self, context: HarnessContext, url: str) -> str:
        inputs: list[JsonValue] = ["text", "image"] if self._images else ["text"]
        model: dict[str, JsonValue] = {
            "name": context.model,
            "tool_call": True,
            "reasoning": True,
            "attachment": self._images,
            "modalities": {"input": inputs, "output": ["text"]},
            "limit": {"context": context.context_length, "output": context.max_output_tokens},
        }
        provider: dict[str, JsonValue] = {
            "npm": SDKS[self.dialect],
            "name": PROVIDER,
            "options": {"baseURL": url, "apiKey": context.key, "timeout": False},
            "models": {context.model: model},
        }
        config: dict[str, JsonValue] = {
            "model": f"{PROVIDER}/{context.model}",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
            "agent": {"title": {"disable": True}},  # a call of its own, before the first
            "provider": {PROVIDER: provider},
        }
        if not self._options.subagents:
            config["tools"] = {"task": False}
        return msgspec.json.format(msgspec.json.encode(config)).decode() + "\n"

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """Its events carry the model's texts and the error, if any, that ended the run.

        A step that begins leaves both behind: after an error of a full context it compacts and goes on (but exits 1
        in the end), and an answer without a word has no text of its own.
        """
        words, error, recovered = "", None, False
        for event in events_of(exit.stdout):
            if event.get("type") == "step_start":
                recovered = recovered or error is not None
                words, error = "", None
            elif event.get("type") == "text":
                words = text_at(event, "part", "text")
            elif event.get("type") == "error":
                error = msgspec.json.encode(event.get("error")).decode()
        if recovered and error is None and exit.code == 1:
            ending = ending_of(msgspec.structs.replace(exit, code=0), calls, words=words)
            return msgspec.structs.replace(ending, evidence=f"exit 1 after an error overcome, else {ending.evidence}")
        return ending_of(exit, calls, words=words, error=error, failed=error is not None)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()
