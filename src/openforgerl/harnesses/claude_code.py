"""Anthropic Claude Code (`@anthropic-ai/claude-code`), unmodified: print mode, one instruction, nothing asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.harnesses.events import last_object, text_at
from openforgerl.harnesses.evidence import ending_of
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import PATH, InstalledPackage, base_url
from openforgerl.harnesses.skills import skill_files
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

IDLE_MS = 1_800_000
"""How long it waits for an answer; a slow model is no broken connection."""


class ClaudeCodeHarness:
    """Adapter."""

    name = "claude-code"
    dialect = "messages"

    def __init__(self, options: HarnessOptions | None = None, *, machine: str | None = None) -> None:
        chosen = options or HarnessOptions()
        self._options = chosen.claude_code
        self._tools = chosen.task_tools
        self._package = InstalledPackage(self.name, chosen, machine=machine)

    def layers(self) -> Sequence[Layer]:
        """Claude Code, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """`claude -p`, the instruction on standard input: as an argument, a leading `/` would name a command."""
        url = base_url(context, self.name, self.dialect)
        options = self._options
        argv = [*self._package.program(), "-p", "--dangerously-skip-permissions", "--output-format", "json"]
        argv += ["--model", context.model]
        if options.bare:
            argv.append("--bare")
        if not options.subagents:
            argv += ["--disallowedTools", "Agent"]
        argv += options.extra_arguments
        env = {
            "PATH": PATH,
            "HOME": context.home,
            "LANG": "C.UTF-8",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": context.key,
            "API_TIMEOUT_MS": str(IDLE_MS),
            "IS_SANDBOX": "1",  # without it, root is refused the permission mode
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a first system block that differs per conversation
            "DISABLE_PROMPT_CACHING": "1",  # cache marks move from message to message
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_output_tokens),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length),  # else it assumes a window of its own
        }
        if not options.experimental_betas:
            env["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] = "1"
        files = skill_files(self._tools, self.name, context.home)
        return Plan(argv=tuple(argv), files=files, env=env, stdin=context.task.instruction)

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """Its last line is a result with the last word, or with `is_error` and the error in its place."""
        result = last_object(exit.stdout) or {}
        failed = result.get("is_error") is True
        words = text_at(result, "result")
        return ending_of(exit, calls, words="" if failed else words, error=words if failed else None, failed=failed)

    def report(self) -> Mapping[str, JsonValue]:
        """Version and digests, checked against the pinned ones."""
        return self._package.report()
