"""OpenClaw as a plan, what its exit means, and the real one in a sandbox against the real proxy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import ConfigError, InputError
from openforgerl.harnesses import observed_user_agents
from openforgerl.harnesses.node import find_node
from openforgerl.harnesses.openclaw import OpenclawHarness
from openforgerl.harnesses.openclaw_completion import complete_openclaw
from openforgerl.harnesses.openclaw_config import CLIENT
from openforgerl.harnesses.openclaw_options import OpenclawOptions
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.skills import TaskTool
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Exit, FinishReason, HarnessContext, ModelCall

from .real_agents import cached, run_agent, tool

MakeContext = Callable[..., HarnessContext]
MakeCall = Callable[..., ModelCall]
CONFIG = "/home/agent/.openclaw/openclaw.json"
PROGRAM = ("/opt/node/bin/node", "/opt/openclaw/node_modules/openclaw/openclaw.mjs")
URLS = {"chat": "http://h/s/v1", "responses": "http://h/s/v1", "messages": "http://h/s", "gemini": "http://h/s"}


def openclaw(cache: str = "/c", images: bool = False, **options: Any) -> OpenclawHarness:
    return OpenclawHarness(HarnessOptions(cache=cache, images=images, openclaw=OpenclawOptions(**options)))


def test_the_embedded_plan(make_context: MakeContext) -> None:
    plan = openclaw(extra_arguments=("--thinking", "low")).plan(make_context(base_urls=URLS))
    assert plan.argv == (
        *PROGRAM,
        *("agent", "exec", "--config", CONFIG, "--cwd", "/workspace", "--model", "openforgerl/policy"),
        *("--json", "--message-file", "/home/agent/task.md", "--timeout", "0", "--thinking", "low"),
    )
    assert (plan.stdin, plan.services) == ("", ())
    assert plan.files["/home/agent/task.md"] == "Copy a.txt to b.txt."
    assert plan.env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "OPENCLAW_CONFIG_PATH": CONFIG,
        "OPENCLAW_STATE_DIR": "/home/agent/.openclaw",
        "OPENCLAW_NO_AUTO_UPDATE": "1",
        "CLAWHUB_DISABLE_TELEMETRY": "1",
    }
    assert json.loads(plan.files[CONFIG]) == {
        "models": {
            "mode": "replace",
            "providers": {
                "openforgerl": {
                    "baseUrl": "http://h/s/v1",
                    "api": "openai-responses",
                    "apiKey": "the-key",
                    "models": [
                        {
                            "id": "policy",
                            "name": "policy",
                            "reasoning": False,
                            "input": ["text"],
                            "contextWindow": 4096,
                            "maxTokens": 512,
                            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                        }
                    ],
                }
            },
            "catalogRefresh": {"enabled": False},
        },
        "agents": {
            "defaults": {
                "workspace": "/workspace",
                "model": {"primary": "openforgerl/policy"},
                "skipBootstrap": True,
                "userTimezone": "UTC",
                "heartbeat": {"every": "0m"},
            }
        },
        "update": {"checkOnStart": False},
        "cron": {"enabled": False},
        "skills": {"load": {"extraDirs": ["/home/agent/.openclaw/skills"]}},
        "tools": {"toolSearch": False, "allow": ["exec", "read", "write", "edit", "process"]},
        "plugins": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("api", "name", "url"),
    [
        ("chat", "openai-completions", "http://h/s/v1"),
        ("messages", "anthropic-messages", "http://h/s"),
        ("gemini", "google-generative-ai", "http://h/s/v1beta"),
    ],
)
def test_the_other_protocols(make_context: MakeContext, api: str, name: str, url: str) -> None:
    harness = openclaw(api=api, images=True, reasoning=True)
    provider = json.loads(harness.plan(make_context(base_urls=URLS)).files[CONFIG])["models"]["providers"][
        "openforgerl"
    ]
    assert (harness.dialect, provider["api"], provider["baseUrl"]) == (api, name, url)
    assert (provider["models"][0]["input"], provider["models"][0]["reasoning"]) == (["text", "image"], True)


def test_its_own_set_of_tools_and_plugins(make_context: MakeContext) -> None:
    config = json.loads(openclaw(tools=(), plugins=True).plan(make_context(base_urls=URLS)).files[CONFIG])
    assert "tools" not in config
    assert "plugins" not in config


def test_the_gateway_plan(make_context: MakeContext) -> None:
    plan = openclaw(mode="gateway", tools=("exec", "sessions_spawn")).plan(make_context(base_urls=URLS))
    assert plan.services == ((*PROGRAM, "gateway", "run"),)
    assert plan.argv == (
        *("/bin/bash", "-c", CLIENT, "client", *PROGRAM, "agent", "--session-id", "task"),
        *("--json", "--message-file", "/home/agent/task.md", "--timeout", "0"),
    )
    assert {name: plan.env[name] for name in ("PORT", "STARTUP", "SETTLE")} == {
        "PORT": "18789",
        "STARTUP": "300",
        "SETTLE": "20",
    }
    assert json.loads(plan.files[CONFIG])["gateway"] == {
        "mode": "local",
        "bind": "loopback",
        "port": 18789,
        "auth": {"mode": "none"},
    }
    assert openclaw(mode="gateway").plan(make_context(base_urls=URLS)).env["SETTLE"] == "0"


def test_task_tools_are_a_skill(make_context: MakeContext) -> None:
    tools = (TaskTool(name="now", description="Tells the time.", command=("date",)),)
    harness = OpenclawHarness(HarnessOptions(name="openclaw", cache="/c", task_tools=tools))
    files = harness.plan(make_context(base_urls=URLS)).files
    assert "## now\n" in files["/home/agent/.openclaw/skills/task-tools/SKILL.md"]


def test_what_is_refused(tmp_path: Path, make_context: MakeContext) -> None:
    with pytest.raises(
        ConfigError, match=r"'sessions_spawn', which only works with harness\.openclaw\.mode = 'gateway'"
    ):
        openclaw(tools=("exec", "sessions_spawn"))
    with pytest.raises(InputError, match=r"openclaw speaks 'responses'.*served: \['chat'\]"):
        openclaw().plan(make_context(base_urls={"chat": "x"}))
    with pytest.raises(InputError, match="run: openforgerl harness install openclaw"):
        openclaw(cache=str(tmp_path)).layers()
    with pytest.raises(ValueError, match=r"harness\.openclaw\.startup must be 1 second or more; got 0"):
        OpenclawOptions(startup=0)


class TestEnding:
    def run(self, code: int, said: Any, *calls: ModelCall) -> tuple[str, bool]:
        text = said if isinstance(said, bytes) else json.dumps(said, indent=2).encode()
        ending = openclaw().ending(Exit(code=code, stdout=text), calls)
        return ending.kind, ending.by_policy

    def test_a_last_word(self, make_call: MakeCall) -> None:
        assert self.run(0, {"ok": True, "final": "Done."}, make_call()) == ("finished", True)
        gateway = {"status": "ok", "result": {"payloads": [{"text": "Done."}], "meta": {}}}
        assert self.run(0, gateway, make_call()) == ("finished", True)

    def test_an_answer_that_its_runner_refuses(self, make_call: MakeCall) -> None:
        error = {"ok": False, "error": {"kind": "incomplete_turn", "message": "incomplete or malformed tool call"}}
        assert self.run(1, error, make_call(("bash", "{"))) == ("crashed", True)
        assert self.run(1, error, make_call(("bash", "{}"))) == ("crashed", False)

    def test_an_empty_answer(self, make_call: MakeCall) -> None:
        assert self.run(1, {"ok": False, "error": {"message": "x"}}, make_call(text=" ")) == ("gave_up", True)

    def test_a_limit_of_ours(self, make_call: MakeCall) -> None:
        error = {"ok": False, "error": {"message": "400 context_length_exceeded"}}
        assert self.run(1, error, make_call()) == ("limit", True)
        cut = make_call(text="", finish_reason=FinishReason.LENGTH)
        assert self.run(0, {"ok": True, "final": ""}, cut) == ("limit", True)


def test_completing_fails_where_openclaw_does_not_start(tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "openclaw"
    package.mkdir(parents=True)
    (package / "openclaw.mjs").write_text("console.log('2026.9.6')")
    complete_openclaw(find_node(), tmp_path)
    (package / ".openclaw-lifecycle-pending").write_text("pending\n")
    with pytest.raises(InputError, match=r"did not complete its installation: exit 0, it said '2026\.9\.6'"):
        complete_openclaw(find_node(), tmp_path)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.sandbox
@pytest.mark.node
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestReal:
    """The installed package: thirty seconds of processor time and more than 1 GB of memory a run."""

    async def test_a_task(self, harness_cache: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
        tools = (TaskTool(name="shout", description="Says it louder.", command=("tr", "a-z", "A-Z")),)
        harness = OpenclawHarness(
            HarnessOptions(name="openclaw", cache=cached(harness_cache, "openclaw"), task_tools=tools)
        )
        skill = "/home/agent/.openclaw/skills/task-tools"
        ran = await run_agent(
            tmp_path,
            renderer,
            harness,
            tool("exec", command="cp a.txt b.txt; id -u; pwd"),
            tool("exec", command=f'python3 {skill}/tool.py shout \'{{"a": "b"}}\''),
            {"text": "Done."},
            timeout=800,
        )
        assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (0, "finished", True), ran.said
        assert ran.files["/workspace/b.txt"] == b"hello\n"
        assert observed_user_agents(ran.calls) == ("OpenAI/JS 7.15.0",)
        first, second, third = ran.calls
        assert {tool.name for tool in first.conversation.tools} >= {"exec", "read", "write", "edit", "process"}
        said = first.conversation.messages[0].text
        assert ".openclaw/skills/task-tools/SKILL.md" in said, said
        assert second.conversation.messages[-1].text == "1000\n/workspace"
        assert third.conversation.messages[-1].text == '{"A": "B"}'
        # Its history only grows: every call continues the one before it, whose call ids come back unchanged.
        assert [call.role_evidence.split()[0] for call in ran.calls] == ["opens", "continues", "continues"]
        sampled = sum(len(call.sampled_ids) for call in ran.calls)
        totals = ran.samples["totals"]
        assert (totals["sampled"], totals["trained"], totals["dropped"]) == (sampled, sampled, {})
