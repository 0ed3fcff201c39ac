"""pi as a plan, and the real pi against a real HTTP server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses import HarnessOptions, PiOptions
from openforgerl.harnesses.pi import PiHarness
from openforgerl.types import Exit, FinishReason, HarnessContext

MakeContext = Callable[..., HarnessContext]
ENTRY = "/opt/pi/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"


@pytest.fixture(scope="session")
def pi(pi_cache: Path) -> PiHarness:
    """The installed pi, checked once."""
    harness = PiHarness(HarnessOptions(cache=str(pi_cache)))
    harness.layers()
    return harness


def test_the_command_line_is_what_was_measured(make_context: MakeContext) -> None:
    plan = PiHarness().plan(make_context(base_urls={"chat": "http://127.0.0.1:8080/s/a/v1"}))
    assert plan.argv == (
        "/opt/node/bin/node",
        ENTRY,
        "-p",
        "--no-session",
        "--provider",
        "openforgerl",
        "--model",
        "policy",
        "--tools",
        "bash,read,write",
        "--system-prompt",
        "You are an agent in a Linux terminal. Use the tools to do the task. Then say Done.",
        "--",
        "Copy a.txt to b.txt.",
    )
    assert plan.stdin == ""
    assert plan.env["PI_OFFLINE"] == "1"
    assert plan.env["HOME"] == "/home/agent"
    assert json.loads(plan.files["/home/agent/.pi/agent/models.json"]) == {
        "providers": {
            "openforgerl": {
                "baseUrl": "http://127.0.0.1:8080/s/a/v1",
                "api": "openai-completions",
                "apiKey": "the-key",
                "models": [
                    {
                        "id": "policy",
                        "name": "policy",
                        "reasoning": False,
                        "input": ["text"],
                        "contextWindow": 8192,  # 4096, and the 4096 that pi always keeps free
                        "maxTokens": 512,
                        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                    }
                ],
            }
        }
    }
    settings = json.loads(plan.files["/home/agent/.pi/agent/settings.json"])
    # Compaction above 8192 - 4608 = 3584 tokens = 4096 - 512: as long as a whole answer still fits.
    assert settings == {"compaction": {"enabled": True, "reserveTokens": 4608, "keepRecentTokens": 1024}}


def test_only_the_instruction_and_the_key_differ_between_rollouts(make_context: MakeContext) -> None:
    one, two = PiHarness().plan(make_context()), PiHarness().plan(make_context(instruction="Other.", key="k2"))
    assert one.argv[:-1] == two.argv[:-1]
    assert one.env == two.env
    assert two.argv[-1] == "Other."


@pytest.mark.parametrize("instruction", ["@file.txt please", "x" * 100_001])
def test_an_instruction_that_cannot_be_an_argument_goes_through_stdin(
    make_context: MakeContext, instruction: str
) -> None:
    plan = PiHarness().plan(make_context(instruction=instruction))
    assert plan.stdin == instruction
    assert instruction not in plan.argv
    assert "--" not in plan.argv


def test_options_change_the_command_line(make_context: MakeContext) -> None:
    options = HarnessOptions(pi=PiOptions(tools=(), system_prompt=None, extra_arguments=("--no-skills",)))
    argv = PiHarness(options).plan(make_context()).argv
    assert argv[2:] == (
        *("-p", "--no-session", "--provider", "openforgerl", "--model", "policy"),
        *("--no-skills", "--", "Copy a.txt to b.txt."),
    )


def test_absent_pi_names_the_install_command(tmp_path: Path, make_context: MakeContext) -> None:
    harness = PiHarness(HarnessOptions(cache=str(tmp_path)))
    with pytest.raises(InputError, match="run: openforgerl harness install pi"):
        harness.layers()
    with pytest.raises(InputError, match="openforgerl harness install pi"):
        harness.report()
    with pytest.raises(InputError, match="served: \\['messages'\\]"):
        harness.plan(make_context(base_urls={"messages": "x"}))


@pytest.fixture
def run(tmp_path: Path, pi: PiHarness, make_context: MakeContext) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Carry a plan out without a sandbox: the layers' places inside become their places outside."""
    harness, layers = pi, pi.layers()

    def outside(text: str) -> str:
        for layer in layers:
            if text.startswith(layer.target + "/"):
                return layer.source + text.removeprefix(layer.target)
        return text

    def carry_out(instruction: str = "Copy a.txt to b.txt.") -> subprocess.CompletedProcess[str]:
        home, workdir = tmp_path / "home", tmp_path / "workspace"
        workdir.mkdir(exist_ok=True)
        plan = harness.plan(make_context(home=str(home), workdir=str(workdir), instruction=instruction))
        for path, text in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        return subprocess.run(
            [outside(word) for word in plan.argv],
            cwd=workdir,
            env={name: outside(value) for name, value in plan.env.items()} | {"TMPDIR": str(tmp_path)},
            input=plan.stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return carry_out


@pytest.mark.node
class TestRealPi:
    def test_it_works_and_asks_for_what_was_captured(self, chat: Any, make: Any, run: Any, tmp_path: Path) -> None:
        (tmp_path / "workspace").mkdir()
        (tmp_path / "workspace" / "a.txt").write_text("hello\n")
        write = {"tool_calls": [make.call("write", '{"path": "d/c.txt", "content": "x"}', "call1")]}
        chat.script = [{"content": "Copying. ", **make.bash("cp a.txt b.txt; cat b.txt")}, write, {"content": "Done."}]
        done = run()
        assert (done.returncode, done.stdout, done.stderr) == (0, "Done.\n", "")
        assert (tmp_path / "workspace" / "b.txt").read_text() == "hello\n"
        assert (tmp_path / "workspace" / "d" / "c.txt").read_text() == "x"
        path, headers, first = chat.requests[0]
        assert path == "/v1/chat/completions"
        assert headers["authorization"] == "Bearer the-key"
        assert headers["user-agent"].startswith("pi/1.6.0 (linux; node/v24.19.0;")
        system = "You are an agent in a Linux terminal. Use the tools to do the task. Then say Done."
        workdir = tmp_path / "workspace"
        assert first["messages"] == [
            {"role": "system", "content": f"{system}\n\n<cwd>\n{workdir}\n</cwd>"},
            {"role": "user", "content": [{"type": "text", "text": "Copy a.txt to b.txt."}]},
        ]
        assert [tool["function"]["name"] for tool in first["tools"]] == ["bash", "read", "write"]
        assert (first["model"], first["stream"], first["max_completion_tokens"]) == ("policy", True, 512)
        assert chat.bodies[2]["messages"] == [
            *first["messages"],
            {
                "role": "assistant",
                "content": "Copying. ",
                "tool_calls": [make.call("bash", '{"command":"cp a.txt b.txt; cat b.txt"}')],
            },
            {"role": "tool", "content": "hello\n", "tool_call_id": "call0"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [make.call("write", '{"path":"d/c.txt","content":"x"}', "call1")],
            },
            {"role": "tool", "content": "Successfully wrote to d/c.txt", "tool_call_id": "call1"},
        ]

    @pytest.mark.parametrize("instruction", ["@a.txt is a name", "-p is a flag", "--", "émoji ☃\n\nsecond"])
    def test_any_instruction_arrives_whole(self, chat: Any, run: Any, instruction: str) -> None:
        chat.script = [{"content": "Done."}]
        assert run(instruction).returncode == 0
        assert chat.bodies[0]["messages"][-1]["content"] == [{"type": "text", "text": instruction}]

    @pytest.mark.parametrize(
        ("answers", "code", "kind", "by_policy"),
        [
            ([{"content": ""}], 0, "gave_up", True),
            ([{"content": "ha", "finish": "length"}], 0, "limit", True),
            (["session_limit"], 1, "limit", True),
            (["session_closed"], 1, "crashed", False),
            (["invalid_key"], 1, "crashed", False),
        ],
    )
    def test_how_it_ends(
        self, chat: Any, run: Any, make_call: Any, answers: list[Any], code: int, kind: str, by_policy: bool
    ) -> None:
        chat.script = [
            (
                403,
                {"content-type": "application/json"},
                json.dumps({"error": {"message": "no", "code": answer}}).encode(),
            )
            if isinstance(answer, str)
            else answer
            for answer in answers
        ]
        done = run()
        assert (done.returncode, done.stdout, len(chat.requests)) == (code, "", 1)
        cut = {"finish_reason": FinishReason.LENGTH} if kind == "limit" and code == 0 else {}
        ending = PiHarness().ending(
            Exit(code=done.returncode, stdout=done.stdout.encode(), stderr=done.stderr.encode()), [make_call(**cut)]
        )
        assert (ending.kind, ending.by_policy) == (kind, by_policy)

    def test_the_report_names_what_ran(self, pi: PiHarness) -> None:
        report = pi.report()
        assert (report["version"], report["node_version"]) == ("1.6.0", "v24.19.0")
        assert report["package_digest"] == "f851b7d5c91e28201b5d3cfbbf0e84dc3dd59fe55b38edc4dca0f08a12c16365"

    def test_the_compile_cache_is_found_at_another_place(self, pi: PiHarness, tmp_path: Path) -> None:
        node, installed = pi.layers()
        cache = Path(installed.source) / "compile-cache"
        before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
        assert all(path.stat().st_mode & 0o004 for path in before), "a sandbox's uid must be able to read it"
        moved = tmp_path / "pi"
        bundle = Path(ENTRY).parent.relative_to("/opt/pi")
        for part in (bundle, bundle.parent.parent / "package.json", Path("compile-cache")):
            source = Path(installed.source) / part
            (moved / part).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, moved / part)
        done = subprocess.run(
            [f"{node.source}/node", str(moved) + ENTRY.removeprefix("/opt/pi"), "--version"],
            env={
                "HOME": str(tmp_path),
                "NODE_COMPILE_CACHE": str(moved / "compile-cache"),
                "NODE_COMPILE_CACHE_PORTABLE": "1",
                "NODE_DEBUG_NATIVE": "COMPILE_CACHE",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "was accepted" in done.stderr
        assert "was rejected" not in done.stderr
