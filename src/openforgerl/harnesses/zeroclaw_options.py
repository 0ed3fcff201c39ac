"""Settings of ZeroClaw (config section `harness.zeroclaw`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class TaskServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server inside the sandbox whose tools the agent gets, named `<server>__<tool>`."""

    command: str
    """Program inside the sandbox; it speaks MCP on its standard streams."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    timeout: int = 300
    """Seconds for one tool call."""


class ZeroclawOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ZeroClaw 0.8.4. It is in no package registry: give `binary`, or an image that has it."""

    binary: str | None = None
    """A statically linked `zeroclaw` on this machine, mounted read-only; null = `program` is in the image."""
    program: str = "/usr/local/bin/zeroclaw"
    """Where the image has it; unused with `binary`."""
    api: Literal["chat", "responses", "messages"] = "chat"
    """The wire protocol it is told to speak."""
    tools: tuple[str, ...] = ("shell", "file_read", "file_write", "file_edit", "glob_search", "content_search")
    """Its own tools on offer (`spawn_subagent` starts sub-agents); empty = all of about 50."""
    servers: dict[str, TaskServer] = {}
    """Task tools: name (lower-case letters, digits and single underscores) → MCP server."""
    max_iterations: int = 200
    """Model calls with tools before it asks for a summary and ends."""
    command_timeout: int = 300
    """Seconds for one shell command."""
    call_timeout: int = 1800
    """Seconds for one model call; a call that takes longer is asked again while the first still runs."""
    extra_arguments: tuple[str, ...] = ()
    """Further command-line arguments of `zeroclaw agent`."""

    def __post_init__(self) -> None:
        for name in ("max_iterations", "command_timeout", "call_timeout"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"harness.zeroclaw.{name} must be 1 or more; got {value}")
        for name in self.servers:
            words = name.split("_")
            if not all(word.isascii() and word.isalnum() and word == word.lower() for word in words):
                raise ValueError(
                    f"harness.zeroclaw.servers: {name!r} must be lower-case letters and digits with single underscores"
                )
