"""Qwen Code (`@qwen-code/qwen-code`), unmodified: headless, one instruction, every tool allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.harnesses.events import events_of, text_at
from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

IDLE_MS = 1_800_000
"""How long it waits for the next piece of an answer; a slow model is no broken connection."""


class QwenCodeHarness:
    """Adapter."""

    name = "qwen-code"
    dialect = "chat"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.qwen_code
        self._images = chosen.images
        self._package = InstalledPackage(self.name, chosen)

    def layers(self) -> Sequence[Layer]:
        """Node and Qwen Code, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """settings.json, and `qwen` with the instruction on standard input."""
        url = base_url(context, self.name, self.dialect)
        argv = [*self._package.program(), "--yolo", "--output-format", "stream-json"]
        if not self._options.subagents:
            argv += ["--exclude-tools", "agent"]
        return Plan(
            argv=(*argv, *self._options.extra_arguments),
            files={f"{context.home}/.qwen/settings.json": self._settings(context)},
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "OPENAI_API_KEY": context.key,
                "OPENAI_BASE_URL": url,
                "OPENAI_MODEL": context.model,
                "QWEN_CODE_NO_RELAUNCH": "true",  # it would load itself a second time, for the same work
                "QWEN_STREAM_IDLE_TIMEOUT_MS": str(IDLE_MS),
                "QWEN_STREAM_MAX_LIFETIME_MS": str(IDLE_MS),
            },
            stdin=context.task.instruction,
        )

    def _settings(self, context: HarnessContext) -> str:
        generation: dict[str, JsonValue] = {
            "timeout": IDLE_MS,
            "contextWindowSize": context.context_length,
            # A limit of our own also keeps it from sampling a cut answer again with a larger one.
            "samplingParams": {"max_tokens": context.max_output_tokens},
            "modalities": {"image": self._images},
        }
        settings: dict[str, JsonValue] = {
            "security": {"auth": {"selectedType": "openai"}},
            "telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
            "memory": {  # agents of their own, with calls of their own, after the task's
                "enableManagedAutoMemory": False,
                "enableManagedAutoDream": False,
                "enableAutoSkill": False,
            },
            "model": {"name": context.model, "generationConfig": generation},
        }
        return msgspec.json.format(msgspec.json.encode(settings)).decode() + "\n"

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """Its last event is a result with the last word or with an error."""
        words, error = "", None
        for event in events_of(exit.stdout):
            if event.get("type") == "result":
                words = text_at(event, "result")
                error = text_at(event, "error", "message") if event.get("is_error") is True else None
        return ending_of(exit, calls, words=words, error=error, failed=error is not None)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()
