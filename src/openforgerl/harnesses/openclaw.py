"""OpenClaw (`openclaw`), unmodified: `agent exec`, its entry point for headless runs, or a gateway and its client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.errors import ConfigError
from openforgerl.harnesses.events import last_object, text_at
from openforgerl.harnesses.evidence import empty_answer, ending_of
from openforgerl.harnesses.openclaw_config import CLIENT, GATEWAY_PORT, PROVIDER, SETTLE, SPAWN, config_file, spawns
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.harnesses.skills import skill_files
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

SESSION = "task"
"""The session's name in OpenClaw; the same in every rollout, since it stands in the prompt."""


class OpenclawHarness:
    """Adapter."""

    name = "openclaw"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.openclaw
        self._images = chosen.images
        self._tools = chosen.task_tools
        self._package = InstalledPackage(self.name, chosen)
        if SPAWN in self._options.tools and self._options.mode == "embedded":
            raise ConfigError(
                f"harness.openclaw.tools has {SPAWN!r}, which only works with harness.openclaw.mode = 'gateway'"
            )

    @property
    def dialect(self) -> str:
        """As the options say."""
        return self._options.api

    def layers(self) -> Sequence[Layer]:
        """Node and OpenClaw, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """openclaw.json, the task in a file, and `openclaw agent exec`, or a gateway and `openclaw agent`."""
        url = base_url(context, self.name, self.dialect)
        options, program = self._options, self._package.program()
        folder = f"{context.home}/.openclaw"
        config, task = f"{folder}/openclaw.json", f"{context.home}/task.md"
        common = ("--json", "--message-file", task, "--timeout", "0", *options.extra_arguments)
        env = {
            "PATH": PATH,
            "HOME": context.home,
            "LANG": "C.UTF-8",
            "OPENCLAW_CONFIG_PATH": config,
            "OPENCLAW_STATE_DIR": folder,
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "CLAWHUB_DISABLE_TELEMETRY": "1",
        }
        files = {
            config: config_file(url=url, options=options, context=context, images=self._images),
            task: context.task.instruction,
            **skill_files(self._tools, self.name, context.home),
        }
        if options.mode == "embedded":
            model = ("--model", f"{PROVIDER}/{context.model}")
            argv = (*program, "agent", "exec", "--config", config, "--cwd", context.workdir, *model, *common)
            return Plan(argv=argv, files=files, env=env)
        waits = {
            "PORT": str(GATEWAY_PORT),
            "STARTUP": str(options.startup),
            "SETTLE": str(SETTLE if spawns(options) else 0),
        }
        return Plan(
            argv=("/bin/bash", "-c", CLIENT, "client", *program, "agent", "--session-id", SESSION, *common),
            files=files,
            env={**env, **waits},
            services=((*program, "gateway", "run"),),
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """It prints an object with the last word, or with an error and exit 1; an empty answer is an error to it."""
        result = last_object(exit.stdout) or {}
        error = text_at(result, "error", "message") or text_at(result, "error") or None
        if exit.code == 1 and calls and empty_answer(calls[-1]):
            return Ending(kind="gave_up", by_policy=True, evidence=f"exit 1 after an empty answer: {error}")
        return ending_of(exit, calls, words=_last_word(result), error=error, failed=result.get("ok") is False)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()


def _last_word(result: dict[str, JsonValue]) -> str:
    """`agent exec` says it in `final`; a gateway's client in the texts of `result.payloads`."""
    final = text_at(result, "final")
    if final:
        return final
    inner = result.get("result")
    payloads = inner.get("payloads") if isinstance(inner, dict) else None
    return "\n".join(text_at(each, "text") for each in payloads) if isinstance(payloads, list) else ""
