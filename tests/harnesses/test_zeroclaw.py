"""ZeroClaw as a plan and a file. The program itself is in no package registry: it is not run here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.toml_text import toml_text
from openforgerl.harnesses.zeroclaw import ZeroclawHarness
from openforgerl.harnesses.zeroclaw_options import TaskServer, ZeroclawOptions
from openforgerl.types import Conversation, Exit, FinishReason, HarnessContext, Message, ModelCall, Role, Text

MakeContext = Callable[..., HarnessContext]
MakeCall = Callable[..., ModelCall]
URLS = {"chat": "http://h/s/v1", "responses": "http://h/s/v1", "messages": "http://h/s"}
CONFIG = "/home/agent/.zeroclaw/config.toml"


def zeroclaw(images: bool = False, **options: Any) -> ZeroclawHarness:
    return ZeroclawHarness(HarnessOptions(images=images, zeroclaw=ZeroclawOptions(**options)))


def test_the_plan(make_context: MakeContext) -> None:
    plan = zeroclaw(extra_arguments=("-t", "0.5")).plan(make_context(base_urls=URLS))
    assert plan.argv == (*("/usr/local/bin/zeroclaw", "agent", "-a", "rl", "-t", "0.5", "-m", "Copy a.txt to b.txt."),)
    assert plan.env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "ZEROCLAW_CONFIG_DIR": "/home/agent/.zeroclaw",
    }
    assert (plan.stdin, plan.services, list(plan.files)) == ("", (), [CONFIG])


def test_the_file_field_by_field(make_context: MakeContext) -> None:
    config = tomllib.loads(zeroclaw().plan(make_context(base_urls=URLS)).files[CONFIG])
    assert config == {
        "schema_version": 3,  # without it the file is taken for version 1 and rewritten
        "providers": {
            "models": {
                "vllm": {  # the `custom` slot would speak a text protocol instead of native tools
                    "rl": {
                        "uri": "http://h/s/v1",
                        "api_key": "the-key",
                        "model": "policy",
                        "timeout_secs": 1800,
                        "vision": False,
                    }
                }
            }
        },
        "risk_profiles": {
            "rl": {
                "level": "full",
                "allowed_commands": ["*"],
                "block_high_risk_commands": False,
                "forbidden_paths": [],
                "sandbox_enabled": False,
                "allowed_tools": [
                    *("shell", "file_read", "file_write", "file_edit", "glob_search", "content_search"),
                ],
            }
        },
        "runtime_profiles": {
            "rl": {
                "max_tool_iterations": 200,
                "max_actions_per_hour": 4294967295,
                "max_context_tokens": 0,
                "shell_timeout_secs": 300,
            }
        },
        "agents": {
            "rl": {
                "model_provider": "vllm.rl",
                "risk_profile": "rl",
                "runtime_profile": "rl",
                "workspace": {"path": "/workspace"},
                "memory": {"backend": "none"},
            }
        },
        "memory": {"auto_save": False},
        "reliability": {"provider_retries": 8, "provider_backoff_ms": 1000},
        "pacing": {"loop_detection_enabled": False},
        "cost": {"enabled": False},
        "skills": {"open_skills_enabled": False},
        "http_request": {"allow_private_hosts": True},
        "observability": {"log_persistence": "none"},
    }


@pytest.mark.parametrize(
    ("api", "slot", "provider"),
    [
        ("responses", "openai", {"uri": "http://h/s/v1", "wire_api": "responses"}),
        ("messages", "anthropic", {"uri": "http://h/s", "max_tokens": 512}),
    ],
)
def test_the_other_protocols(make_context: MakeContext, api: str, slot: str, provider: dict[str, Any]) -> None:
    harness = zeroclaw(api=api)
    config = tomllib.loads(harness.plan(make_context(base_urls=URLS)).files[CONFIG])
    common = {"api_key": "the-key", "model": "policy", "timeout_secs": 1800}
    assert harness.dialect == api
    assert config["providers"]["models"] == {slot: {"rl": {**common, **provider}}}
    assert config["agents"]["rl"]["model_provider"] == f"{slot}.rl"


def test_task_tools_over_mcp(make_context: MakeContext) -> None:
    server = TaskServer(command="/opt/task/server", args=("--x", 'a "b"'), env={"MODE": "é"}, timeout=60)
    config = tomllib.loads(zeroclaw(servers={"mail": server}).plan(make_context(base_urls=URLS)).files[CONFIG])
    assert config["mcp"]["servers"] == [
        {
            "name": "mail",
            "transport": "stdio",
            "command": "/opt/task/server",
            "args": ["--x", 'a "b"'],
            "env": {"MODE": "é"},
            "tool_timeout_secs": 60,
        }
    ]
    assert config["mcp_bundles"] == {"task": {"servers": ["mail"]}}
    assert config["agents"]["rl"]["mcp_bundles"] == ["task"]  # a server in no bundle is not used


@pytest.mark.parametrize("task", ["-x is a flag", "/think:max please"])
def test_a_task_that_it_would_take_for_something_else(make_context: MakeContext, task: str) -> None:
    assert zeroclaw().plan(make_context(base_urls=URLS, instruction=task)).argv[-1] == f"Task: {task}"


def test_a_binary_given_by_path(tmp_path: Path, make_context: MakeContext) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    binary = folder / "zeroclaw-musl"
    binary.write_bytes(b"x")
    harness = zeroclaw(binary=str(binary))
    with pytest.raises(InputError, match=r"must be the absolute path of a program; ZeroClaw is in no package registry"):
        harness.layers()
    binary.chmod(0o755)
    (layer,) = harness.layers()
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # sha256 of "x"
    assert (layer.source, layer.target, layer.digest) == (str(folder), "/opt/zeroclaw", digest)
    assert harness.plan(make_context(base_urls=URLS)).argv[0] == "/opt/zeroclaw/zeroclaw-musl"
    assert harness.report()["package_digest"] == digest
    (folder / "secret").write_text("")
    with pytest.raises(InputError, match=r"must be alone in its folder.*beside it is 'secret'"):
        harness.layers()
    assert zeroclaw().layers() == ()


def test_what_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(InputError, match=r"task t: the instruction has 100001 bytes; ZeroClaw takes it as an argument"):
        zeroclaw().plan(make_context(base_urls=URLS, instruction="x" * 100_001))
    with pytest.raises(ValueError, match=r"'Mail__x' must be lower-case letters and digits with single underscores"):
        ZeroclawOptions(servers={"Mail__x": TaskServer(command="x")})
    with pytest.raises(ValueError, match=r"harness\.zeroclaw\.max_iterations must be 1 or more; got 0"):
        ZeroclawOptions(max_iterations=0)


class TestEnding:
    def run(self, exit: Exit, *calls: ModelCall) -> tuple[str, bool]:
        ending = zeroclaw().ending(exit, calls)
        return ending.kind, ending.by_policy

    def test_its_exits(self, make_call: MakeCall) -> None:
        said = Exit(code=0, stdout=b"Done.\n")
        assert self.run(said, make_call()) == ("finished", True)
        assert self.run(said, make_call(finish_reason=FinishReason.LENGTH)) == ("limit", True)
        asked = Message(
            role=Role.USER, parts=(Text("You have reached the maximum number of tool iterations (200). Sum up."),)
        )
        assert self.run(said, make_call(conversation=Conversation(messages=(asked,), tools=()))) == ("limit", True)
        assert self.run(Exit(code=1, stderr=b"empty"), make_call(text="")) == ("gave_up", True)
        assert self.run(Exit(code=1, stderr=b"x"), make_call()) == ("crashed", False)
        assert self.run(Exit(code=2, stderr=b"error: usage")) == ("crashed", False)


def test_toml_says_what_json_does() -> None:
    value = {"a": '\x7f\\"\n\U0001f600é', "b": [1, 2.5, True], "c": {"d e": {"f": []}, "g": [{"h": "i", "j k": {}}]}}
    assert tomllib.loads(toml_text(json.loads(json.dumps(value)))) == value
    with pytest.raises(ValueError, match=r"a\.b is null, which TOML cannot say"):
        toml_text({"a": {"b": None}})
