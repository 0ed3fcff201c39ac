"""OpenAI Codex CLI (`@openai/codex`), unmodified: `codex exec`, one instruction, no approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.harnesses.codex_config import KEY_VARIABLE, config_file, last_word_and_error
from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import ARGUMENT_LIMIT, PATH, InstalledPackage, base_url
from openforgerl.harnesses.skills import skill_files
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan


class CodexHarness:
    """Adapter."""

    name = "codex"
    dialect = "responses"

    def __init__(self, options: HarnessOptions | None = None, *, machine: str | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.codex
        self._tools = chosen.task_tools
        self._package = InstalledPackage(self.name, chosen, machine=machine)

    def layers(self) -> Sequence[Layer]:
        """codex, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """config.toml, and `codex exec` with the instruction as its last argument (`-`: from standard input)."""
        url = base_url(context, self.name, self.dialect)
        instruction = context.task.instruction
        # A single `-` is codex's own word for standard input.
        by_stdin = instruction == "-" or len(instruction.encode()) > ARGUMENT_LIMIT
        (program,) = self._package.program()
        home = f"{context.home}/.codex"
        return Plan(
            argv=(
                *(program, "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"),
                *self._options.extra_arguments,
                *(("-",) if by_stdin else ("--", instruction)),
            ),
            files={
                f"{home}/config.toml": config_file(self._options, context, url),
                **skill_files(self._tools, self.name, context.home),
            },
            env={
                "PATH": f"{program.removesuffix('/bin/codex')}/codex-path:{PATH}",  # its own ripgrep
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "CODEX_HOME": home,
                KEY_VARIABLE: context.key,
            },
            stdin=instruction if by_stdin else "",
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """codex exits 0 after the model's last word, whatever it is, and 1 after an error that it also reports."""
        words, error = last_word_and_error(exit.stdout)
        return ending_of(exit, calls, words=words, error=error, failed=error is not None)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()
