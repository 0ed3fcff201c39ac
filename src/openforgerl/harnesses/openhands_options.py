"""Settings of OpenHands (config section `harness.openhands`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class OpenhandsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenHands software agent SDK."""

    tools: tuple[Literal["terminal", "file_editor", "task_tracker"], ...] = ("terminal", "file_editor")
    """Its tools on offer, besides `finish` and `think`."""
    max_iterations: int = 500
    """Model calls before it ends by itself."""
    call_timeout: int = 1800
    """Seconds for one model call."""

    def __post_init__(self) -> None:
        for name in ("max_iterations", "call_timeout"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"harness.openhands.{name} must be 1 or more; got {value}")
