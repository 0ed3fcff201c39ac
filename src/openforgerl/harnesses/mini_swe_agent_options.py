"""Settings of mini-swe-agent (config section `harness.mini_swe_agent`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class MiniSweAgentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """mini-swe-agent. Its prompts come from its own `mini.yaml`."""

    api: Literal["chat", "responses", "messages"] = "chat"
    """The wire protocol it is told to speak."""
    step_limit: int = 0
    """Model calls before it ends by itself; 0 = only the session's own limits."""
    command_timeout: int = 30
    """Seconds for one command."""
    attempts: int = 5
    """Tries of one model call. It waits 4 to 60 s between them, also after a plain 400: its own default of 10
    takes five minutes to tell a lasting error."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments."""

    def __post_init__(self) -> None:
        for name, least in (("step_limit", 0), ("command_timeout", 1), ("attempts", 1)):
            value: int = getattr(self, name)
            if value < least:
                raise ValueError(f"harness.mini_swe_agent.{name} must be {least} or more; got {value}")
