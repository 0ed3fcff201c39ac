"""The ReAct agent as a real program against a real HTTP server."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses import HarnessOptions, ReactOptions
from openforgerl.harnesses.react import AGENT, ReactHarness
from openforgerl.types import Exit, HarnessContext, Plan

TOOL = (
    '{"type": "function", "function": {"name": "bash", "description": "Run a bash command.", "parameters": '
    '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}'
)
MakeContext = Callable[..., HarnessContext]


@pytest.fixture
def run(tmp_path: Path, make_context: MakeContext) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Carry a plan out as a sandbox would: files, cleared environment, work directory, standard input."""

    def carry_out(instruction: str = "Copy a.txt to b.txt.", **options: Any) -> subprocess.CompletedProcess[str]:
        home, workdir = tmp_path / "home", tmp_path / "workspace"
        workdir.mkdir(exist_ok=True)
        harness = ReactHarness(HarnessOptions(react=ReactOptions(**options)))
        plan: Plan = harness.plan(make_context(home=str(home), workdir=str(workdir), instruction=instruction))
        for path, text in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        return subprocess.run(
            [sys.executable, *plan.argv[1:]],
            cwd=workdir,
            env=plan.env,
            input=plan.stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return carry_out


def test_it_imports_nothing_but_the_standard_library() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(AGENT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("stream", [True, False])
def test_a_task_from_instruction_to_last_word(chat: Any, make: Any, run: Any, tmp_path: Path, stream: bool) -> None:
    chat.script = [
        {"content": None, **make.bash("echo héllo > a.txt; cat a.txt")},
        {"content": "then", "reasoning_content": "Copy it.", **make.bash("cp a.txt b.txt", "call1")},
        {"content": "Done. "},
    ]
    done = run(stream=stream)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Done. \n", "")
    assert (tmp_path / "workspace" / "b.txt").read_text() == "héllo\n"
    path, headers, first = chat.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer the-key"
    assert headers["user-agent"] == "openforgerl-react/1"
    assert first["messages"] == [
        {"role": "system", "content": "You are an agent in a Linux terminal. Use the bash tool, then say Done."},
        {"role": "user", "content": "Copy a.txt to b.txt."},
    ]
    assert json.dumps(first["tools"]) == f"[{TOOL}]"  # to the byte: templates print it
    assert (first["model"], first["max_tokens"], first.get("stream", False)) == ("policy", 512, stream)
    # Every request is the one before plus what happened since, and the model's words come back verbatim.
    call0 = make.bash("echo héllo > a.txt; cat a.txt")["tool_calls"]
    call1 = make.bash("cp a.txt b.txt", "call1")["tool_calls"]
    assert chat.bodies[2]["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": None, "tool_calls": call0},
        {"role": "tool", "tool_call_id": "call0", "content": "héllo\n"},
        {"role": "assistant", "content": "then", "reasoning_content": "Copy it.", "tool_calls": call1},
        {"role": "tool", "tool_call_id": "call1", "content": "(no output)"},
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("bash", '{"command": "echo oops; exit 3"}', "oops\n\n\nCommand exited with code 3"),
        ("bash", '{"command": "true"}', "(no output)"),
        ("bash", '{"command": "false"}', "\n\nCommand exited with code 1"),
        ("bash", '{"command": "echo out; echo err >&2"}', "out\nerr\n"),
        ("bash", '{"command": "printf \'\\\\xff\'"}', "�"),
        (
            "bash",
            '{"command": "echo a\\u0000b"}',
            "/bin/bash: a command cannot hold a null byte\n\nCommand exited with code 1",
        ),
        ("bash", '{"command": "env | grep -c -e REACT -e the-key"}', "0\n\n\nCommand exited with code 1"),
        ("bash", '{"command": "cat"}', "(no output)"),
        ("nosuch", "{}", "Tool nosuch not found"),
        ("bash", "{}", 'Validation failed for tool "bash":\n  - command: missing\n\nReceived arguments:\n{}'),
        (
            "bash",
            '{"command": 5}',
            'Validation failed for tool "bash":\n  - command: must be string\n\nReceived arguments:\n'
            '{\n  "command": 5\n}',
        ),
        ("bash", "[]", 'Validation failed for tool "bash":\n  - command: missing\n\nReceived arguments:\n[]'),
    ],
)
def test_what_a_call_gives_back(chat: Any, make: Any, run: Any, name: str, arguments: str, result: str) -> None:
    chat.script = [{"tool_calls": [make.call(name, arguments)]}, {"content": "Done."}]
    assert run().returncode == 0
    assert chat.bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call0", "content": result}
    assert chat.bodies[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"] == arguments


def test_arguments_that_are_not_json_go_back_as_they_are(chat: Any, make: Any, run: Any) -> None:
    chat.script = [{"tool_calls": [make.call("bash", '{"command": "echo')]}, {"content": "Done."}]
    assert run().returncode == 0
    result = chat.bodies[1]["messages"][-1]["content"]
    assert result.startswith('Invalid arguments for tool "bash": ')
    assert result.endswith('\n\nReceived arguments:\n{"command": "echo')
    assert chat.bodies[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"command": "echo'


def test_calls_of_one_turn_run_in_order(chat: Any, make: Any, run: Any) -> None:
    calls = [make.call("bash", f'{{"command": "echo {n} >> f; cat f"}}', f"c{n}") for n in (1, 2)]
    chat.script = [{"tool_calls": calls}, {"content": "Done."}]
    assert run().returncode == 0
    assert [(m["tool_call_id"], m["content"]) for m in chat.bodies[1]["messages"][-2:]] == [
        ("c1", "1\n"),
        ("c2", "1\n2\n"),
    ]


def test_long_output_keeps_its_end(chat: Any, make: Any, run: Any) -> None:
    chat.script = [make.bash("seq 1000"), {"content": "Done."}]
    assert run(output_limit=100).returncode == 0
    # seq 1000 prints 9·2 + 90·3 + 900·4 + 5 = 3893 bytes
    head, _, rest = chat.bodies[1]["messages"][-1]["content"].partition("\n")
    assert head == "[Output truncated: the last 100 of 3893 bytes]"
    assert len(rest) == 100
    assert rest.endswith("999\n1000\n")


def test_a_command_that_hangs_is_killed_with_its_children(chat: Any, make: Any, run: Any, tmp_path: Path) -> None:
    chat.script = [make.bash("echo before; (sleep 4; touch late) & sleep 60"), {"content": "Done."}]
    started = time.monotonic()
    assert run(command_timeout=1).returncode == 0
    assert time.monotonic() - started < 30
    assert chat.bodies[1]["messages"][-1]["content"] == "before\n\n\nCommand timed out after 1 seconds"
    time.sleep(4.2)
    assert not (tmp_path / "workspace" / "late").exists()


def test_a_background_process_does_not_hold_the_turn(chat: Any, make: Any, run: Any) -> None:
    chat.script = [make.bash("sleep 60 & echo started"), {"content": "Done."}]
    started = time.monotonic()
    assert run().returncode == 0
    assert time.monotonic() - started < 30
    assert chat.bodies[1]["messages"][-1]["content"] == "started\n"


def test_the_turn_limit(chat: Any, make: Any, run: Any) -> None:
    chat.script = [make.bash("true")] * 5
    done = run(max_turns=3)
    assert (done.returncode, len(chat.requests)) == (3, 3)


def test_malformed_turns_in_a_row(chat: Any, make: Any, run: Any) -> None:
    bad = {"tool_calls": [make.call("bash", "{")]}
    chat.script = [bad, make.bash("true"), bad, bad, {"content": "never asked"}]
    done = run(max_bad_turns=2)
    assert (done.returncode, len(chat.requests)) == (5, 4)


def test_what_may_pass_is_asked_again(chat: Any, make: Any, run: Any) -> None:
    cut = make.stream_of({"content": "half an ans"}, end=False)
    chat.script = [
        (429, {"Retry-After": "0.1"}, b"{}"),
        (503, {"Retry-After": "0"}, b"{}"),
        cut,
        b'data: {"error": {"message": "engine", "code": "engine_error"}}\n\n',
        {"content": "Done."},
    ]
    done = run()
    assert (done.returncode, done.stdout) == (0, "Done.\n")
    assert all(body == chat.bodies[0] for body in chat.bodies)


def test_retry_after_is_obeyed(chat: Any, run: Any) -> None:
    chat.script = [(429, {"Retry-After": "1.5"}, b"{}"), {"content": "Done."}]
    started = time.monotonic()
    assert run().returncode == 0
    assert time.monotonic() - started >= 1.5


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "kind", "by_policy"),
    [
        (400, "context_length_exceeded", 6, "limit", True),
        (403, "session_limit", 4, "limit", True),
        (403, "session_closed", 4, "crashed", False),
        (401, "invalid_key", 4, "crashed", False),
    ],
)
def test_refusals_end_it(
    chat: Any, run: Any, status: int, code: str, exit_code: int, kind: str, by_policy: bool
) -> None:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    chat.script = [(status, {"content-type": "application/json"}, body)]
    done = run()
    assert (done.returncode, len(chat.requests)) == (exit_code, 1)
    ending = ReactHarness().ending(Exit(code=done.returncode, stderr=done.stderr.encode()), [])
    assert (ending.kind, ending.by_policy) == (kind, by_policy)


def test_wrong_settings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(AGENT)], env={}, input="", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "REACT_BASE_URL" in done.stderr


def test_a_plan_does_not_depend_on_the_rollout(make_context: MakeContext) -> None:
    plan = ReactHarness().plan(make_context())
    assert plan.argv == ("/usr/bin/python3", "-I", "-B", "/home/agent/.react/agent.py")
    assert plan.stdin == "Copy a.txt to b.txt."
    assert plan == ReactHarness().plan(make_context())
    with pytest.raises(InputError, match="served: \\['messages'\\]"):
        ReactHarness().plan(make_context(base_urls={"messages": "x"}))


@pytest.mark.parametrize(
    ("code", "kind", "by_policy"),
    [(3, "limit", True), (5, "gave_up", True), (1, "crashed", False), (2, "crashed", False)],
)
def test_exit_codes_without_a_recorded_call_are_crashes_unless_documented(
    code: int, kind: str, by_policy: bool, make_call: Any
) -> None:
    ending = ReactHarness().ending(Exit(code=code, stderr=b"why"), [make_call()])
    assert (ending.kind, ending.by_policy) == (kind, by_policy)
    assert "why" in ending.evidence


def test_settings_are_checked() -> None:
    for wrong in ({"max_turns": 0}, {"command_timeout": 0}, {"output_limit": 1}, {"max_bad_turns": 0}):
        with pytest.raises(ValueError, match=rf"harness\.react\.{next(iter(wrong))} must be"):
            ReactOptions(**wrong)  # type: ignore[arg-type]
