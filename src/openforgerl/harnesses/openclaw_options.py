"""Settings of OpenClaw (config section `harness.openclaw`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class OpenclawOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenClaw."""

    api: Literal["chat", "responses", "messages", "gemini"] = "responses"
    """The wire protocol it is told to speak. Only in `responses` does its history grow by appending alone: in the
    others it moves a block of its own to the end of every request."""
    mode: Literal["embedded", "gateway"] = "embedded"
    """`embedded`: one process for one task. `gateway`: a gateway beside the task's client; sub-agents need it."""
    tools: tuple[str, ...] = ("exec", "read", "write", "edit", "process")
    """OpenClaw's tools on offer (`sessions_spawn` starts sub-agents); empty = its own set of 14, and 52 more that
    are found by searching."""
    plugins: bool = False
    """Load its plugins, as it does by default: twelve more seconds of processor time at every start."""
    reasoning: bool = False
    """The model thinks: its thoughts are sent back to it."""
    startup: int = 300
    """Seconds that the gateway may take to open its port."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments of `openclaw agent`."""

    def __post_init__(self) -> None:
        if self.startup < 1:
            raise ValueError(f"harness.openclaw.startup must be 1 second or more; got {self.startup}")
