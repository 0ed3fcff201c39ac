"""What a user may set about harnesses (config section `harness`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.harnesses.mini_swe_agent_options import MiniSweAgentOptions
from openforgerl.harnesses.openclaw_options import OpenclawOptions
from openforgerl.harnesses.openhands_options import OpenhandsOptions
from openforgerl.harnesses.skills import TaskTool, check_tools
from openforgerl.harnesses.zeroclaw_options import ZeroclawOptions


class PiOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """pi. The defaults are part of the prompt that a model sees: change them and its prefix changes."""

    api: Literal["chat", "responses", "messages", "gemini"] = "chat"
    """The wire protocol that pi speaks to the model."""
    tools: tuple[str, ...] = ("bash", "read", "write")
    """pi's tools on offer, in pi's own order whatever the order here; empty = pi's default set."""
    system_prompt: str | None = "You are an agent in a Linux terminal. Use the tools to do the task. Then say Done."
    """Replaces pi's system prompt; null keeps pi's own."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments, before the instruction."""


class ReactOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The in-house ReAct harness."""

    max_turns: int = 20
    """Model calls before the harness gives up."""
    command_timeout: float = 30.0
    """Seconds for one bash command."""
    output_limit: int = 16_000
    """Bytes of one command's output that the model gets to see (the last ones)."""
    max_bad_turns: int = 5
    """Turns in a row without one well-formed call before the harness gives up."""
    stream: bool = True
    """Ask for a streamed answer."""
    system_prompt: str = "You are an agent in a Linux terminal. Use the bash tool, then say Done."

    def __post_init__(self) -> None:
        checks = (
            ("max_turns", self.max_turns >= 1, "1 or more"),
            ("command_timeout", self.command_timeout > 0, "above 0 seconds"),
            ("output_limit", self.output_limit >= 100, "100 bytes or more"),
            ("max_bad_turns", self.max_bad_turns >= 1, "1 or more"),
        )
        for name, good, accepted in checks:
            if not good:
                raise ValueError(f"harness.react.{name} must be {accepted}; got {getattr(self, name)!r}")


class CodexOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI Codex CLI."""

    subagents: bool = True
    """Offer the tools that start sub-agents, as codex does by default."""
    features: dict[str, bool] = {}
    """Further switches of codex's own `[features]` (`goals = false` takes three tools away)."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments of `codex exec`, before the instruction."""


class ClaudeCodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anthropic Claude Code."""

    subagents: bool = True
    """Offer the tool that starts sub-agents, as Claude Code does by default."""
    bare: bool = False
    """`--bare`: three tools and a system prompt of two lines, for models with a small context."""
    experimental_betas: bool = True
    """As shipped: tools deferred behind a search tool, context management, omitted thoughts. Off: all tools inline."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments (`--tools`, `Bash,Read`), before the instruction."""


class OpencodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """opencode."""

    api: Literal["chat", "responses", "messages"] = "chat"
    """The wire protocol that opencode speaks to the model."""
    subagents: bool = True
    """Offer the tool that starts sub-agents, as opencode does by default."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments of `opencode run`."""


class QwenCodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qwen Code."""

    subagents: bool = True
    """Offer the tool that starts sub-agents, as Qwen Code does by default."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments."""


class GeminiCliOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Google Gemini CLI."""

    subagents: bool = True
    """Offer the tool that starts sub-agents, as Gemini CLI does by default."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments."""


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any program. `{base_url}`, `{key}`, `{instruction}`, `{workdir}`, `{home}` and `{model}` are filled in
    in every text; `{{` and `}}` are braces."""

    argv: tuple[str, ...] = ()
    """The program and its arguments; the program must exist inside the sandbox."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Absolute path inside the sandbox → text written before the program starts."""
    stdin: str = ""
    dialect: str = "chat"
    """The wire protocol the program speaks: which base URL it gets."""
    services: tuple[tuple[str, ...], ...] = ()
    """Programs started before and left running."""
    literal: bool = False
    """Fill nothing in: texts are used as they are."""


class HarnessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which harness runs, and how."""

    name: str = "pi"
    """Registry name (`openforgerl harness list` shows them) or `module:Class`."""
    cache: str | None = None
    """Where harnesses are installed; null = $OPENFORGERL_CACHE, else ~/.cache/openforgerl."""
    images: bool = False
    """The model can look at images: harnesses that ask are told so."""
    task_tools: tuple[TaskTool, ...] = ()
    """The task's own tools, as a skill with a command-line program: for `codex`, `claude-code` and `openclaw`."""
    pi: PiOptions = PiOptions()
    codex: CodexOptions = CodexOptions()
    claude_code: ClaudeCodeOptions = ClaudeCodeOptions()
    opencode: OpencodeOptions = OpencodeOptions()
    qwen_code: QwenCodeOptions = QwenCodeOptions()
    gemini_cli: GeminiCliOptions = GeminiCliOptions()
    mini_swe_agent: MiniSweAgentOptions = MiniSweAgentOptions()
    openclaw: OpenclawOptions = OpenclawOptions()
    zeroclaw: ZeroclawOptions = ZeroclawOptions()
    openhands: OpenhandsOptions = OpenhandsOptions()
    react: ReactOptions = ReactOptions()
    command: CommandOptions = CommandOptions()

    def __post_init__(self) -> None:
        check_tools(self.task_tools, self.name)
