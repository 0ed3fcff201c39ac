"""OpenHands (`openhands-sdk` and `openhands-tools`), unmodified, run by a short program that uses it as a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.harnesses.events import events_of, text_at
from openforgerl.harnesses.evidence import crashed_or_caused, ending_before_exit_code, ending_of
from openforgerl.harnesses.openhands_driver import DRIVER
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, base_url
from openforgerl.harnesses.pip_package import InstalledPipPackage
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan


class OpenhandsHarness:
    """Adapter. Needs Python 3.12 or later in the sandbox; `layers` says so where there is none."""

    name = "openhands"
    dialect = "chat"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.openhands
        self._images = chosen.images
        self._package = InstalledPipPackage(self.name, chosen)

    def layers(self) -> Sequence[Layer]:
        """The installation, read-only. Raises `InputError` naming the install command, or the Python it lacks."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """The driver, with its settings and the task on standard input."""
        url = base_url(context, self.name, self.dialect)
        driver = f"{context.home}/.openhands/driver.py"
        settings: dict[str, JsonValue] = {
            "llm": {
                "model": f"openai/{context.model}",
                "base_url": url,
                "api_key": context.key,
                "usage_id": "agent",
                "timeout": self._options.call_timeout,
                "max_input_tokens": context.context_length,
                "max_output_tokens": context.max_output_tokens,
                "disable_vision": not self._images,
            },
            "tools": list(self._options.tools),
            "workspace": context.workdir,
            "max_iterations": self._options.max_iterations,
            "task": context.task.instruction,
        }
        return Plan(
            argv=(self._package.python(), driver),
            files={driver: DRIVER},
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm fetches a price list at every start
                "OPENHANDS_SUPPRESS_BANNER": "1",
            },
            stdin=msgspec.json.encode(settings).decode(),
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """The driver says how the conversation ended; without its word the exit code and the calls decide."""
        said = next((event for event in reversed(list(events_of(exit.stdout))) if "status" in event), None)
        if exit.code != 0 or said is None:
            early = ending_before_exit_code(exit, calls)
            return early or crashed_or_caused(exit, calls)
        status, code = text_at(said, "status"), text_at(said, "code")
        if status == "finished":
            return ending_of(exit, calls, words=text_at(said, "final") or status)
        early = ending_before_exit_code(exit, calls, code)
        if early is not None:
            return early
        if code == "MaxIterationsReached":
            return Ending(kind="limit", by_policy=True, evidence=f"its limit of {self._options.max_iterations} calls")
        if status == "stuck":
            return Ending(kind="gave_up", by_policy=True, evidence="OpenHands found its agent stuck in a loop")
        return crashed_or_caused(exit, calls, f"status {status}, code {code!r}")

    def report(self) -> Mapping[str, JsonValue]:
        """Version, digests (checked against the pinned package digest) and Python's version."""
        return self._package.report()
