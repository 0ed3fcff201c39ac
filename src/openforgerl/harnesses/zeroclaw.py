"""ZeroClaw 0.8.4, unmodified: `zeroclaw agent`, one task with its whole tool loop.

Written from its source and documentation: this adapter has not been run with the program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.evidence import empty_answer, ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import ARGUMENT_LIMIT, PATH, base_url
from openforgerl.harnesses.trees import digest_file
from openforgerl.harnesses.zeroclaw_config import ALIAS, config_file
from openforgerl.types import Ending, Exit, FinishReason, HarnessContext, JsonValue, Layer, ModelCall, Plan

INSIDE = "/opt/zeroclaw"
"""Where a sandbox finds the folder of a binary given by path."""
OUT_OF_ITERATIONS = "You have reached the maximum number of tool iterations"
"""How it asks for a summary, in a call without tools, before it ends with exit 0."""


class ZeroclawHarness:
    """Adapter."""

    name = "zeroclaw"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self._options = options or HarnessOptions()
        self._zeroclaw = self._options.zeroclaw
        self._digest = ""

    @property
    def dialect(self) -> str:
        """As the options say."""
        return self._zeroclaw.api

    def layers(self) -> Sequence[Layer]:
        """The folder of the binary, read-only; none where the image has it. Raises `InputError` when it is absent."""
        if self._zeroclaw.binary is None:
            return ()
        binary = Path(self._zeroclaw.binary)
        if not binary.is_absolute() or not binary.is_file() or not os.access(binary, os.X_OK):
            raise InputError(
                f"harness.zeroclaw.binary {str(binary)!r} must be the absolute path of a program; ZeroClaw is in no "
                "package registry: take the statically linked program from its release archive, or an image that has it"
            )
        beside = sorted(path.name for path in binary.parent.iterdir() if path != binary)
        if beside:
            # Its whole folder becomes visible to the agent.
            raise InputError(
                f"harness.zeroclaw.binary {str(binary)!r} must be alone in its folder, which agents get to see; "
                f"beside it is {beside[0]!r}"
            )
        self._digest = digest_file(binary)
        return (Layer(source=str(binary.parent), target=INSIDE, digest=self._digest),)

    def plan(self, context: HarnessContext) -> Plan:
        """config.toml and `zeroclaw agent` with the task as an argument: it takes one in no other way."""
        url = base_url(context, self.name, self.dialect)
        task = context.task.instruction
        if len(task.encode()) > ARGUMENT_LIMIT:
            raise InputError(
                f"task {context.task.name}: the instruction has {len(task.encode())} bytes; ZeroClaw takes it as an "
                f"argument only, of {ARGUMENT_LIMIT} bytes at most"
            )
        if task.startswith(("-", "/think")):
            task = f"Task: {task}"  # else its command line takes it for an option, or for a directive of its own
        folder = f"{context.home}/.zeroclaw"
        binary = self._zeroclaw.binary
        program = f"{INSIDE}/{Path(binary).name}" if binary else self._zeroclaw.program
        return Plan(
            argv=(program, "agent", "-a", ALIAS, *self._zeroclaw.extra_arguments, "-m", task),
            files={f"{folder}/config.toml": config_file(self._options, context, url)},
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "TZ": "UTC",  # the time stands in its prompt
                "ZEROCLAW_CONFIG_DIR": folder,
            },
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """It prints the last word; it also exits 0 after its last iteration and after an answer cut at its length."""
        if exit.code == 1 and calls and empty_answer(calls[-1]):
            return Ending(kind="gave_up", by_policy=True, evidence="exit 1 after empty answers")
        ending = ending_of(exit, calls, words=exit.stdout.decode(errors="replace"))
        if ending.kind != "finished":
            return ending
        last = calls[-1]
        if last.finish_reason is FinishReason.LENGTH:
            return Ending(kind="limit", by_policy=True, evidence="exit 0 after an answer cut at its length")
        messages = last.conversation.messages
        if messages and messages[-1].text.startswith(OUT_OF_ITERATIONS):
            limit = self._zeroclaw.max_iterations
            return Ending(kind="limit", by_policy=True, evidence=f"exit 0 after {limit} iterations, its limit")
        return ending

    def report(self) -> Mapping[str, JsonValue]:
        """The version that this adapter is written for, and the digest of a binary given by path."""
        self.layers()
        return {
            "name": self.name,
            "version": "0.8.4 (as written for; not asked)",
            "package_digest": self._digest,
            "user_agent": "",
        }
