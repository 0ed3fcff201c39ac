"""pi (`@earendil-works/pi-coding-agent`), unmodified, run as its users run it: print mode, one instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.harnesses.pi_config import arguments, models_file, settings_file
from openforgerl.harnesses.pi_trial import COMPILE_CACHE
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan


class PiHarness:
    """Adapter. The installation is checked when its layers are first asked for, once per instance."""

    name = "pi"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self._options = options or HarnessOptions()
        self._package = InstalledPackage(self.name, self._options)

    @property
    def dialect(self) -> str:
        """As `harness.pi.api` says."""
        return self._options.pi.api

    def layers(self) -> Sequence[Layer]:
        """Node and pi, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """models.json, settings.json, and pi's command line with the instruction as its last argument."""
        url = base_url(context, self.name, self.dialect)
        argv, stdin = arguments(self._options.pi, context.task.instruction)
        agent = f"{context.home}/.pi/agent"
        length, answer = context.context_length, context.max_output_tokens
        return Plan(
            argv=(*self._package.program(), *argv),
            files={
                f"{agent}/models.json": models_file(
                    base_url=url,
                    key=context.key,
                    context_length=length,
                    max_output_tokens=answer,
                    dialect=self.dialect,
                    images=self._options.images,
                ),
                f"{agent}/settings.json": settings_file(context_length=length, max_output_tokens=answer),
            },
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "PI_OFFLINE": "1",
                "NODE_COMPILE_CACHE": f"{self._package.inside}/{COMPILE_CACHE}",
                "NODE_COMPILE_CACHE_PORTABLE": "1",
            },
            stdin=stdin,
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """pi exits 0 after the model's last word, which it prints, and after some of its silences.

        pi 1.6 prints nothing after an empty answer, a cut one, or a refused (too long) prompt. Other errors exit 1.
        """
        return ending_of(exit, calls, words=exit.stdout.decode(errors="replace"))

    def report(self) -> Mapping[str, JsonValue]:
        """Version, digests (checked against the pinned package digest) and Node's version."""
        return self._package.report()
