"""What a user may set about harnesses (config section `harness`)."""

from __future__ import annotations

import msgspec


class PiOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """pi. The defaults are part of the prompt that a model sees: change them and its prefix changes."""

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
    """Registry name (`pi`, `react`, `command`) or `module:Class`."""
    cache: str | None = None
    """Where harnesses are installed; null = $OPENFORGERL_CACHE, else ~/.cache/openforgerl."""
    pi: PiOptions = PiOptions()
    react: ReactOptions = ReactOptions()
    command: CommandOptions = CommandOptions()
