"""pi (`@earendil-works/pi-coding-agent`), unmodified, run as its users run it: print mode, one instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.evidence import (
    complete_calls,
    crashed_or_caused,
    ending_before_exit_code,
    limit_reached,
    tail,
)
from openforgerl.harnesses.installation import Installation, default_cache, inspect
from openforgerl.harnesses.node import INSIDE as NODE_INSIDE
from openforgerl.harnesses.node import find_node
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.pi_config import ENTRY, arguments, models_file, settings_file
from openforgerl.harnesses.pi_trial import COMPILE_CACHE
from openforgerl.harnesses.recipes import recipe_of
from openforgerl.types import Ending, Exit, FinishReason, HarnessContext, JsonValue, Layer, ModelCall, Plan

INSIDE = "/opt/pi"
"""Where a sandbox finds the installation."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class PiHarness:
    """Adapter. The installation is checked when its layers are first asked for, once per instance."""

    name = "pi"
    dialect = "chat"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self._options = options or HarnessOptions()
        self._cache = Path(self._options.cache) if self._options.cache else default_cache()
        self._layers: tuple[Layer, ...] = ()
        self._installation: Installation | None = None

    def layers(self) -> Sequence[Layer]:
        """Node and pi, read-only. Raises `InputError` naming the install command when absent or changed."""
        if not self._layers:
            found = inspect("pi", self._cache)
            pi = Layer(source=found.directory, target=INSIDE, digest=found.tree_digest)
            self._layers = (find_node().layer(), pi)
            self._installation = found
        return self._layers

    def plan(self, context: HarnessContext) -> Plan:
        """models.json, settings.json, and pi's command line with the instruction as its last argument."""
        base_url = context.base_urls.get(self.dialect)
        if base_url is None:
            raise InputError(f"pi speaks {self.dialect!r}, which is not served; served: {sorted(context.base_urls)}")
        argv, stdin = arguments(self._options.pi, context.task.instruction)
        agent = f"{context.home}/.pi/agent"
        length, answer = context.context_length, context.max_output_tokens
        return Plan(
            argv=(f"{NODE_INSIDE}/node", f"{INSIDE}/{ENTRY}", *argv),
            files={
                f"{agent}/models.json": models_file(
                    base_url=base_url, key=context.key, context_length=length, max_output_tokens=answer
                ),
                f"{agent}/settings.json": settings_file(context_length=length, max_output_tokens=answer),
            },
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "PI_OFFLINE": "1",
                "NODE_COMPILE_CACHE": f"{INSIDE}/{COMPILE_CACHE}",
                "NODE_COMPILE_CACHE_PORTABLE": "1",
            },
            stdin=stdin,
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """pi exits 0 after the model's last word and after some of its silences; other errors exit 1."""
        early = ending_before_exit_code(exit, calls)
        if early is not None:
            return early
        if exit.code != 0:
            return crashed_or_caused(exit, calls)
        if not complete_calls(calls):
            return Ending(kind="crashed", by_policy=False, evidence=f"exit 0 without a complete call: {tail(exit)}")
        if not exit.stdout.strip():
            return self._silent(exit, calls)
        return Ending(kind="finished", by_policy=True, evidence="exit 0")

    @staticmethod
    def _silent(exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """pi 1.6 exits 0 and prints nothing after an empty answer, a cut one, or a refused (too long) prompt."""
        limit = limit_reached(exit, calls)
        if limit is not None:
            return Ending(kind="limit", by_policy=True, evidence=f"{limit}: exit 0, nothing printed")
        if calls[-1].finish_reason is FinishReason.LENGTH:
            return Ending(kind="limit", by_policy=True, evidence="answer length: exit 0, nothing printed")
        return Ending(kind="gave_up", by_policy=True, evidence="exit 0, nothing printed: no last word")

    def report(self) -> Mapping[str, JsonValue]:
        """Version, digests (checked against the pinned package digest) and Node's version."""
        self.layers()
        assert self._installation is not None  # layers() sets it or raises
        found, recipe = self._installation, recipe_of("pi")
        return {
            "name": self.name,
            "version": found.version,
            "package": recipe.package,
            "package_digest": found.package_digest,
            "tree_digest": found.tree_digest,
            "node_version": found.node_version,
            "user_agent": recipe.user_agent,
        }
