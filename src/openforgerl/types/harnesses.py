"""What a harness is told, and what it wants done."""

from __future__ import annotations

from typing import Literal

import msgspec

from openforgerl.types.tasks import Rollout, Task


class HarnessContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a plan may depend on; a plan is a pure function of it."""

    task: Task
    rollout: Rollout
    base_urls: dict[str, str]
    """Dialect name → base URL as seen from inside the sandbox."""
    key: str
    """The attempt's secret; dead at sealing."""
    model: str
    context_length: int
    """Tokens of prompt and answer together."""
    max_output_tokens: int
    home: str
    workdir: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness wants done: files to write, then one program to run."""

    argv: tuple[str, ...]
    files: dict[str, str] = {}
    """Absolute path inside → text."""
    env: dict[str, str] = {}
    stdin: str = ""
    services: tuple[tuple[str, ...], ...] = ()
    """Programs started before `argv` and left running (a gateway)."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness's exit means. `by_policy` says that the model's own output caused it."""

    kind: Literal["finished", "crashed", "gave_up", "limit"]
    by_policy: bool
    evidence: str
