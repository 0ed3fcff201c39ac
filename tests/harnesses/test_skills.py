"""A task's own tools as a skill: the files, and the program that calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.skills import TaskTool, skill_files

SEARCH = TaskTool(
    name="search_mail",
    description="Finds letters.",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words to find."},
            "limit": {"type": ["integer", "null"], "minimum": 1},
            "deep": {"type": "boolean"},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
    command=(sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(3)"),
)
NOW = TaskTool(name="now", description="Tells the time.", command=("date",))


def test_the_files() -> None:
    files = skill_files((SEARCH, NOW), "claude-code", "/home/agent")
    folder = "/home/agent/.claude/skills/task-tools"
    assert sorted(files) == [f"{folder}/SKILL.md", f"{folder}/tool.py", f"{folder}/tools.json"]
    assert [tool["name"] for tool in json.loads(files[f"{folder}/tools.json"])] == ["search_mail", "now"]
    skill = files[f"{folder}/SKILL.md"]
    assert skill.startswith(
        "---\nname: task-tools\n"
        'description: "The tools of this task: search_mail, now. Read this before using one of them."\n---\n'
    )
    assert f'    python3 {folder}/tool.py NAME \'{{"argument": "value"}}\'\n' in skill
    assert skill.endswith(
        "## search_mail\n\nFinds letters.\n\n"
        "- `query` (string, required): Words to find.\n"
        '- `limit` (integer or null, {"minimum": 1})\n'
        "- `deep` (boolean)\n\n"
        "## now\n\nTells the time.\n\nNo arguments: `{}`.\n"
    )


@pytest.mark.parametrize(("harness", "folder"), [("codex", ".codex"), ("openclaw", ".openclaw")])
def test_where_other_harnesses_look(harness: str, folder: str) -> None:
    assert f"/home/agent/{folder}/skills/task-tools/SKILL.md" in skill_files((NOW,), harness, "/home/agent")
    assert skill_files((), harness, "/home/agent") == {}


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mini-swe-agent takes no skills; those that do: codex, claude-code, openclaw"
    ):
        HarnessOptions(name="mini-swe-agent", task_tools=(NOW,))
    with pytest.raises(ValueError, match=r"harness\.task_tools: two tools are called 'now'"):
        HarnessOptions(name="codex", task_tools=(NOW, NOW))
    for fields, words in (
        ({"name": "a b"}, r"name 'a b' must be letters, digits, _ and -"),
        ({"command": ()}, r"now has no command"),
        ({"parameters": {"type": "array"}}, r"parameters of now must be an object's schema"),
    ):
        with pytest.raises(ValueError, match=words):
            TaskTool(**{"name": "now", "description": "", "command": ("date",), **fields})


@pytest.fixture
def call(tmp_path: Path) -> Any:
    files = skill_files((SEARCH,), "codex", str(tmp_path))
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    program = next(path for path in files if path.endswith("tool.py"))

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-I", program, *argv], input=stdin, capture_output=True, text=True, check=False, timeout=30
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_call_reaches_the_tool_and_its_exit_code_comes_back(call: Any) -> None:
    # The tool prints the arguments it got and exits 3.
    assert call("search_mail", '{"query": "ü", "limit": null}') == (3, '{"query": "\\u00fc", "limit": null}\n', "")
    assert call("search_mail", "-", stdin='{"query": "x"}') == (3, '{"query": "x"}\n', "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "usage: tool.py NAME"),
        (("other", "{}"), "tools: search_mail"),
        (("search_mail", "query=x"), "the arguments are no JSON"),
        (("search_mail", "[1]"), "search_mail: the arguments must be a JSON object, not [1]"),
        (("search_mail", "{}"), "search_mail: missing: query"),
        (("search_mail", '{"query": 5}'), "search_mail: query must be string, not 5"),
        (("search_mail", '{"query": "x", "limit": true}'), "limit must be integer or null, not true"),
        (("search_mail", '{"query": "x", "deep": 1}'), "deep must be boolean, not 1"),
        (("search_mail", '{"query": "x", "page": 1}'), "unknown: page; known: query, limit, deep"),
    ],
)
def test_a_wrong_call_is_explained_and_not_made(call: Any, argv: tuple[str, ...], said: str) -> None:
    code, out, error = call(*argv)
    assert (code, out) == (2, "")
    assert said in error
