"""What a user may set about the proxy (config section `proxy`)."""

from __future__ import annotations

import re
from typing import Literal

import msgspec


class ProxyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the proxy listens and what it puts up with."""

    host: str = "127.0.0.1"
    """Address of both ports. Agents need only the data port; keep the control port out of their reach."""
    port: int = 0
    """Data port, for agents; 0 = any free one."""
    control_port: int = 0
    """Control port, for us; 0 = any free one."""
    control_token_file: str = ""
    """File with the control API's token; made with mode 0600 when missing. Empty = no control port at all."""
    unix_socket: str = ""
    """Path of a Unix socket that serves the data port's routes too; empty = none. One that begins with NUL is in the
    abstract namespace: no file, gone with the process."""
    public_url: str = ""
    """Origin that agents reach the data port under, when it is not its own address (`https://proxy.example`)."""
    strict_fields: bool = False
    """Refuse request fields that the dialect's table does not list, instead of recording them."""
    scrub: tuple[str, ...] = ()
    """Regular expressions of lines that are removed from system and user messages before the model sees them: headers
    that change with every request, and so make every call a row of its own. The model never sees what they say. The
    request as it came is recorded too, with a warning for each expression that fitted a line."""
    reasoning: Literal["as-template", "restore"] = "as-template"
    """What is rendered of a turn that the harness sends back without its thought. `as-template`: the turn as it came,
    which is what the model would be served in deployment. `restore`: with its thought, where all before it is as it
    was; whether it is shown is then the chat template's decision."""
    answer_form: str = "auto"
    """How the model writes tool calls (docs/model-families.md): `auto` reads it off the chat template and says what
    it found, or the name of a form."""
    prompt_package: str = ""
    """A format of the package `renderers` (extra `renderers`) that writes prompts instead of the chat template, such
    as `kimi-k2`; empty = the chat template, which is what the model is served with."""
    body_limit_mb: float = 64.0
    """Largest request body in MiB; a larger one gets 413."""
    header_limit_kb: int = 16
    """Longest request line, and longest single header, in KiB."""
    connections_per_listener: int = 128
    """Most connections at once through one socket that a sandbox handed over; the data port itself has no bound."""
    keep_alive_s: float = 15.0
    """Silence in a stream after which a comment is sent, so that no client gives up on a slow model."""
    read_timeout_s: float = 60.0
    """How long a client may take to send its request body."""
    write_timeout_s: float = 120.0
    """How long a client may take to read a piece before it counts as gone."""
    parting_s: float = 5.0
    """How long a stream stays open at most, for the client to read why the model failed, before it is cut. Clients that
    see the cut first never read the error, and harnesses do another thing then."""
    idle_timeout_s: float = 75.0
    """How long a connection may be open without a whole request head."""
    shutdown_timeout_s: float = 5.0
    """How long closing waits for clients that are still being answered; calls are recorded either way."""

    def __post_init__(self) -> None:
        for name in ("port", "control_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be 0 to 65535; got {getattr(self, name)!r}")
        for pattern in self.scrub:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"scrub must be regular expressions; {pattern!r} is none: {error}") from error
        for name in (
            "body_limit_mb",
            "header_limit_kb",
            "connections_per_listener",
            "keep_alive_s",
            "read_timeout_s",
            "write_timeout_s",
            "parting_s",
            "idle_timeout_s",
            "shutdown_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)!r}")
