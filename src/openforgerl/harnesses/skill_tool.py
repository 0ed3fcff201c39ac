"""Calls a task's tool from a command line: `tool.py NAME '{"argument": "value"}'`, or with the object on stdin as `-`.

Copied into the sandbox beside `tools.json`, and run by the sandbox's Python: standard library only, nothing of ours.
The tool itself is a program that gets the arguments as JSON on standard input; its output and exit code are passed on.
Exit 2: the call is wrong, and the reason is on standard error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
USAGE = 'usage: tool.py NAME \'{"argument": "value"}\'   (or `-`: the object is on standard input)'


def problem(arguments: Any, schema: dict[str, Any]) -> str | None:
    """What is wrong with the arguments by the outermost level of their JSON schema, or None."""
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {json.dumps(arguments)}"
    properties: dict[str, Any] = schema.get("properties", {})
    missing = [name for name in schema.get("required", []) if name not in arguments]
    if missing:
        return f"missing: {', '.join(missing)}"
    given: dict[str, Any] = arguments
    for name, value in given.items():
        known = properties.get(name)
        if known is None:
            if schema.get("additionalProperties", True) is False:
                return f"unknown: {name}; known: {', '.join(properties)}"
            continue
        wanted = known.get("type") if isinstance(known, dict) else None
        names: list[str] = wanted if isinstance(wanted, list) else [wanted] if isinstance(wanted, str) else []
        accepted = tuple(kind for each in names for kind in TYPES.get(each, (object,)))
        is_bool = isinstance(value, bool)  # Python's bool is an int, JSON's is not
        if accepted and (not isinstance(value, accepted) or (is_bool and bool not in accepted)):
            return f"{name} must be {' or '.join(names)}, not {json.dumps(value)}"
    return None


def main(argv: list[str]) -> int:
    """Check one call and carry it out; the exit code."""
    folder = Path(__file__).resolve().parent
    tools: dict[str, Any] = {tool["name"]: tool for tool in json.loads((folder / "tools.json").read_text("utf-8"))}
    if len(argv) != 2 or argv[0] not in tools:
        sys.stderr.write(f"{USAGE}\ntools: {', '.join(tools)}\n")
        return 2
    tool = tools[argv[0]]
    try:
        arguments = json.loads(sys.stdin.read() if argv[1] == "-" else argv[1])
    except ValueError as error:
        sys.stderr.write(f"the arguments are no JSON: {error}\n{USAGE}\n")
        return 2
    wrong = problem(arguments, tool["parameters"])
    if wrong is not None:
        sys.stderr.write(f"{tool['name']}: {wrong}\n")
        return 2
    return subprocess.run(tool["command"], input=json.dumps(arguments).encode(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
