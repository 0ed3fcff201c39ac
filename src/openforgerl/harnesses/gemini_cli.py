"""Google Gemini CLI (`@google/gemini-cli`), unmodified: headless, one instruction, every tool allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.harnesses.events import last_object, text_at
from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

ASSUMED_WINDOW = 1_048_576
"""The context window that it assumes for a model it does not know (`tokenLimit` in its core)."""


class GeminiCliHarness:
    """Adapter."""

    name = "gemini-cli"
    dialect = "gemini"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.gemini_cli
        self._package = InstalledPackage(self.name, chosen)

    def layers(self) -> Sequence[Layer]:
        """Node and Gemini CLI, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """settings.json, and `gemini` with the instruction on standard input."""
        url = base_url(context, self.name, self.dialect)
        argv = (*self._package.program(), "--yolo", "--output-format", "json", "-m", context.model)
        return Plan(
            argv=(*argv, *self._options.extra_arguments),
            files={f"{context.home}/.gemini/settings.json": self._settings(context)},
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "GEMINI_API_KEY": context.key,
                "GOOGLE_GEMINI_BASE_URL": url,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                "GEMINI_CLI_NO_RELAUNCH": "true",  # it would load itself a second time, for the same work
            },
            stdin=context.task.instruction,
        )

    def _settings(self, context: HarnessContext) -> str:
        window = max(context.context_length - context.max_output_tokens, context.context_length // 2)
        override: dict[str, JsonValue] = {
            "match": {"model": context.model},
            "modelConfig": {"generateContentConfig": {"maxOutputTokens": context.max_output_tokens}},
        }
        settings: dict[str, JsonValue] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": {
                "name": context.model,
                "compressionThreshold": round(window / ASSUMED_WINDOW, 6),
                "disableLoopDetection": True,  # it asks the model itself, in calls of their own
            },
            "modelConfigs": {"customOverrides": [override]},
        }
        if not self._options.subagents:
            settings["experimental"] = {"enableAgents": False}
        return msgspec.json.format(msgspec.json.encode(settings)).decode() + "\n"

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """It prints one object: the last word, or the error."""
        printed = last_object(exit.stdout) or last_object(exit.stderr) or {}
        failed = printed.get("error") is not None
        error = text_at(printed, "error", "message") if failed else None
        return ending_of(exit, calls, words=text_at(printed, "response"), error=error, failed=failed)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()
