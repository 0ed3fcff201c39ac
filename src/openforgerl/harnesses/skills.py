"""A task's own tools for harnesses that take none: a skill with a command-line program (arXiv 2607.21557, §4).

The harness shows the model the skill's name and description; the model reads SKILL.md when it wants to and calls the
tools through its shell. Harnesses that take tools natively or over MCP are better served that way.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from openforgerl.types import JsonValue

FOLDERS = {
    "codex": ".codex/skills",
    "claude-code": ".claude/skills",
    "openclaw": ".openclaw/skills",
}
"""Harness → where it looks for a user's skills, below the home directory."""
SKILL = "task-tools"
"""The skill's name, and its folder's."""
PROGRAM = Path(__file__).with_name("skill_tool.py")


class TaskTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that a task brings along."""

    name: str
    """Letters, digits, `_` and `-`."""
    description: str
    parameters: dict[str, JsonValue] = {}
    """JSON schema of the arguments, an object; empty = none are needed."""
    command: tuple[str, ...]
    """Program inside the sandbox and its arguments; it gets the call's arguments as JSON on standard input."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isascii() or not self.name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"harness.task_tools: name {self.name!r} must be letters, digits, _ and -")
        if not self.command:
            raise ValueError(f"harness.task_tools: {self.name} has no command")
        if self.parameters.get("type", "object") != "object":
            raise ValueError(f"harness.task_tools: the parameters of {self.name} must be an object's schema")


def skill_files(tools: Sequence[TaskTool], harness: str, home: str) -> dict[str, str]:
    """The files that give the tools to `harness`: absolute path inside the sandbox → text. None for no tools."""
    check_tools(tools, harness)
    if not tools:
        return {}
    folder = f"{home}/{FOLDERS[harness]}/{SKILL}"
    listed: list[JsonValue] = [
        {"name": tool.name, "parameters": tool.parameters, "command": list(tool.command)} for tool in tools
    ]
    return {
        f"{folder}/SKILL.md": _skill(tools, f"{folder}/tool.py"),
        f"{folder}/tool.py": PROGRAM.read_text(encoding="utf-8"),
        f"{folder}/tools.json": json.dumps(listed, indent=1, ensure_ascii=False) + "\n",
    }


def check_tools(tools: Sequence[TaskTool], harness: str) -> None:
    """`ValueError` for a harness that has no folder for skills, and for two tools of one name."""
    if tools and harness not in FOLDERS:
        raise ValueError(
            f"harness.task_tools: {harness} takes no skills; those that do: {', '.join(FOLDERS)} "
            "(zeroclaw takes MCP servers: harness.zeroclaw.servers)"
        )
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"harness.task_tools: two tools are called {twice[0]!r}")


def _skill(tools: Sequence[TaskTool], program: str) -> str:
    what = f"The tools of this task: {', '.join(tool.name for tool in tools)}. Read this before using one of them."
    call = f"python3 {shlex.quote(program)}"
    lines = [
        "---",
        f"name: {SKILL}",
        f"description: {json.dumps(what)}",  # a JSON string is a YAML string
        "---",
        "",
        "# The tools of this task",
        "",
        "Call a tool in the shell, with its arguments as one JSON object:",
        "",
        f'    {call} NAME \'{{"argument": "value"}}\'',
        "",
        "Its answer is on standard output. Exit code 2 means that the call is wrong; the reason is on standard error.",
        "An argument that is hard to quote can go through standard input: give `-` instead of the object.",
    ]
    for tool in tools:
        lines += ["", f"## {tool.name}", "", tool.description.strip(), ""]
        lines += _arguments(tool.parameters)
    return "\n".join(lines) + "\n"


def _arguments(parameters: Mapping[str, JsonValue]) -> list[str]:
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict) or not properties:
        return ["No arguments: `{}`."]
    needed = required if isinstance(required, list) else []
    lines: list[str] = []
    for name, schema in properties.items():
        known = schema if isinstance(schema, dict) else {}
        rest = {key: value for key, value in known.items() if key not in ("type", "description")}
        kind = known.get("type", "any")
        notes = [" or ".join(str(each) for each in kind) if isinstance(kind, list) else str(kind)]
        notes += ["required"] if name in needed else []
        notes += [json.dumps(rest, ensure_ascii=False)] if rest else []
        said = known.get("description")
        lines.append(f"- `{name}` ({', '.join(notes)})" + (f": {said}" if isinstance(said, str) else ""))
    return lines
