"""codex, claude-code, opencode, qwen-code, gemini-cli and pi's four APIs as plans, field by field."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses.claude_code import ClaudeCodeHarness
from openforgerl.harnesses.codex import CodexHarness
from openforgerl.harnesses.gemini_cli import GeminiCliHarness
from openforgerl.harnesses.opencode import OpencodeHarness
from openforgerl.harnesses.options import (
    ClaudeCodeOptions,
    CodexOptions,
    GeminiCliOptions,
    HarnessOptions,
    OpencodeOptions,
    PiOptions,
    QwenCodeOptions,
)
from openforgerl.harnesses.pi import PiHarness
from openforgerl.harnesses.qwen_code import QwenCodeHarness
from openforgerl.protocols import Harness
from openforgerl.types import HarnessContext, Plan

MakeContext = Callable[..., HarnessContext]
OPENAI = "http://127.0.0.1:8080/s/a/v1"
BARE = "http://127.0.0.1:8080/s/a"
URLS = {"chat": OPENAI, "responses": OPENAI, "messages": BARE, "gemini": BARE}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EVERYWHERE = {"HOME": "/home/agent", "LANG": "C.UTF-8"}
CODEX = "/opt/codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
CLAUDE = "/opt/claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
OPENCODE = "/opt/opencode/node_modules/opencode-linux-x64/bin/opencode"
ALL: list[Harness] = [
    CodexHarness(machine="x86_64"),
    ClaudeCodeHarness(machine="x86_64"),
    OpencodeHarness(machine="x86_64"),
    QwenCodeHarness(),
    GeminiCliHarness(),
    PiHarness(),
]


@pytest.fixture
def plan(make_context: MakeContext) -> Callable[..., Plan]:
    """The plan for a context of 4096 tokens and answers of 512."""

    def make(harness: Harness, **changes: Any) -> Plan:
        return harness.plan(make_context(**{"base_urls": URLS, **changes}))

    return make


def test_codex(plan: Callable[..., Plan]) -> None:
    made = plan(CodexHarness(machine="x86_64"), model='m"odel', workdir="/work space/x.y")
    assert made.argv == (
        *(f"{CODEX}/bin/codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
        *("--json", "--", "Copy a.txt to b.txt."),
    )
    assert made.stdin == ""
    assert made.env == {
        **EVERYWHERE,
        "PATH": f"{CODEX}/codex-path:{PATH}",
        "CODEX_HOME": "/home/agent/.codex",
        "OPENFORGERL_API_KEY": "the-key",
    }
    assert list(made.files) == ["/home/agent/.codex/config.toml"]
    assert tomllib.loads(made.files["/home/agent/.codex/config.toml"]) == {
        "model": 'm"odel',
        "model_provider": "openforgerl",
        "model_context_window": 4096,
        "model_auto_compact_token_limit": 3584,  # 4096 - 512: as long as a whole answer still fits
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "model_providers": {
            "openforgerl": {
                "name": "openforgerl",
                "base_url": OPENAI,
                "env_key": "OPENFORGERL_API_KEY",
                "wire_api": "responses",
                "stream_idle_timeout_ms": 1_800_000,
            }
        },
        "projects": {"/work space/x.y": {"trust_level": "trusted"}},
        "analytics": {"enabled": False},
        "features": {"plugins": False, "apps": False, "tool_suggest": False},
    }


def test_codex_options(plan: Callable[..., Plan]) -> None:
    options = CodexOptions(subagents=False, features={"goals": False}, extra_arguments=("--enable", "x"))
    made = plan(CodexHarness(HarnessOptions(codex=options), machine="aarch64"))
    assert made.argv[0] == (
        "/opt/codex/node_modules/@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex"
    )
    assert made.argv[-4:] == ("--enable", "x", "--", "Copy a.txt to b.txt.")
    features = tomllib.loads(made.files["/home/agent/.codex/config.toml"])["features"]
    assert features == {"plugins": False, "apps": False, "tool_suggest": False, "multi_agent": False, "goals": False}


@pytest.mark.parametrize("instruction", ["-", "é" * 50_001])
def test_codex_takes_what_is_no_argument_from_standard_input(plan: Callable[..., Plan], instruction: str) -> None:
    made = plan(CodexHarness(machine="x86_64"), instruction=instruction)
    assert (made.argv[-2:], made.stdin) == (("--json", "-"), instruction)


def test_claude_code(plan: Callable[..., Plan]) -> None:
    made = plan(ClaudeCodeHarness(machine="x86_64"))
    assert made.argv == (
        *(CLAUDE, "-p", "--dangerously-skip-permissions", "--output-format", "json", "--model", "policy"),
    )
    assert made.stdin == "Copy a.txt to b.txt."
    assert made.files == {}
    assert made.env == {
        **EVERYWHERE,
        "PATH": PATH,
        "ANTHROPIC_BASE_URL": BARE,
        "ANTHROPIC_API_KEY": "the-key",
        "API_TIMEOUT_MS": "1800000",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_PROMPT_CACHING": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "4096",
    }


def test_claude_code_options(plan: Callable[..., Plan]) -> None:
    options = ClaudeCodeOptions(subagents=False, bare=True, experimental_betas=False, extra_arguments=("--tools", "A"))
    made = plan(ClaudeCodeHarness(HarnessOptions(claude_code=options), machine="x86_64"))
    assert made.argv[7:] == ("--bare", "--disallowedTools", "Agent", "--tools", "A")
    assert made.env["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] == "1"


def test_opencode(plan: Callable[..., Plan]) -> None:
    made = plan(OpencodeHarness(machine="x86_64"))
    assert made.argv == (OPENCODE, "run", "--format", "json")
    assert made.stdin == "Copy a.txt to b.txt."
    assert made.env == {
        **EVERYWHERE,
        "PATH": PATH,
        "XDG_CONFIG_HOME": "/home/agent/.config",
        "XDG_DATA_HOME": "/home/agent/.local/share",
        "XDG_CACHE_HOME": "/home/agent/.cache",
        "XDG_STATE_HOME": "/home/agent/.local/state",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    assert list(made.files) == ["/home/agent/.config/opencode/opencode.json"]
    assert json.loads(made.files["/home/agent/.config/opencode/opencode.json"]) == {
        "model": "openforgerl/policy",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
        "agent": {"title": {"disable": True}},
        "provider": {
            "openforgerl": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "openforgerl",
                "options": {"baseURL": OPENAI, "apiKey": "the-key", "timeout": False},
                "models": {
                    "policy": {
                        "name": "policy",
                        "tool_call": True,
                        "reasoning": True,
                        "attachment": False,
                        "modalities": {"input": ["text"], "output": ["text"]},
                        "limit": {"context": 4096, "output": 512},
                    }
                },
            }
        },
    }


@pytest.mark.parametrize(
    ("api", "package", "url"),
    [
        ("responses", "@ai-sdk/openai", OPENAI),
        ("messages", "@ai-sdk/anthropic", OPENAI),  # its SDK adds /messages alone
    ],
)
def test_opencode_options(plan: Callable[..., Plan], api: Any, package: str, url: str) -> None:
    options = OpencodeOptions(api=api, subagents=False, extra_arguments=("--print-logs",))
    harness = OpencodeHarness(HarnessOptions(images=True, opencode=options), machine="x86_64")
    assert harness.dialect == api
    made = plan(harness)
    assert made.argv[1:] == ("run", "--format", "json", "--print-logs")
    config = json.loads(made.files["/home/agent/.config/opencode/opencode.json"])
    provider = config["provider"]["openforgerl"]
    assert (provider["npm"], provider["options"]["baseURL"]) == (package, url)
    assert provider["models"]["policy"]["attachment"] is True
    assert provider["models"]["policy"]["modalities"]["input"] == ["text", "image"]
    assert config["tools"] == {"task": False}


def test_qwen_code(plan: Callable[..., Plan]) -> None:
    made = plan(QwenCodeHarness())
    assert made.argv == (
        *("/opt/node/bin/node", "--expose-gc", "--liftoff-only"),
        "/opt/qwen-code/node_modules/@qwen-code/qwen-code/cli.js",
        *("--yolo", "--output-format", "stream-json"),
    )
    assert made.stdin == "Copy a.txt to b.txt."
    assert made.env == {
        **EVERYWHERE,
        "PATH": PATH,
        "OPENAI_API_KEY": "the-key",
        "OPENAI_BASE_URL": OPENAI,
        "OPENAI_MODEL": "policy",
        "QWEN_CODE_NO_RELAUNCH": "true",
        "QWEN_STREAM_IDLE_TIMEOUT_MS": "1800000",
        "QWEN_STREAM_MAX_LIFETIME_MS": "1800000",
    }
    assert list(made.files) == ["/home/agent/.qwen/settings.json"]
    assert json.loads(made.files["/home/agent/.qwen/settings.json"]) == {
        "security": {"auth": {"selectedType": "openai"}},
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {
            "enableManagedAutoMemory": False,
            "enableManagedAutoDream": False,
            "enableAutoSkill": False,
        },
        "model": {
            "name": "policy",
            "generationConfig": {
                "timeout": 1_800_000,
                "contextWindowSize": 4096,
                "samplingParams": {"max_tokens": 512},
                "modalities": {"image": False},
            },
        },
    }


def test_qwen_code_options(plan: Callable[..., Plan]) -> None:
    options = QwenCodeOptions(subagents=False, extra_arguments=("--debug",))
    made = plan(QwenCodeHarness(HarnessOptions(images=True, qwen_code=options)))
    assert made.argv[-3:] == ("--exclude-tools", "agent", "--debug")
    settings = json.loads(made.files["/home/agent/.qwen/settings.json"])
    assert settings["model"]["generationConfig"]["modalities"] == {"image": True}


def test_gemini_cli(plan: Callable[..., Plan]) -> None:
    made = plan(GeminiCliHarness())
    assert made.argv == (
        *("/opt/node/bin/node", "--liftoff-only"),
        "/opt/gemini-cli/node_modules/@google/gemini-cli/bundle/gemini.js",
        *("--yolo", "--output-format", "json", "-m", "policy"),
    )
    assert made.stdin == "Copy a.txt to b.txt."
    assert made.env == {
        **EVERYWHERE,
        "PATH": PATH,
        "GEMINI_API_KEY": "the-key",
        "GOOGLE_GEMINI_BASE_URL": BARE,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    assert list(made.files) == ["/home/agent/.gemini/settings.json"]
    assert json.loads(made.files["/home/agent/.gemini/settings.json"]) == {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {
            "name": "policy",
            "compressionThreshold": 0.003418,  # (4096 - 512) / 1048576, the window that it assumes
            "disableLoopDetection": True,
        },
        "modelConfigs": {
            "customOverrides": [
                {
                    "match": {"model": "policy"},
                    "modelConfig": {"generateContentConfig": {"maxOutputTokens": 512}},
                }
            ]
        },
    }


def test_gemini_cli_options(plan: Callable[..., Plan]) -> None:
    options = GeminiCliOptions(subagents=False, extra_arguments=("--debug",))
    made = plan(GeminiCliHarness(HarnessOptions(gemini_cli=options)))
    assert made.argv[-1] == "--debug"
    assert json.loads(made.files["/home/agent/.gemini/settings.json"])["experimental"] == {"enableAgents": False}


@pytest.mark.parametrize(
    ("api", "called", "url"),
    [
        ("chat", "openai-completions", OPENAI),
        ("responses", "openai-responses", OPENAI),
        ("messages", "anthropic-messages", BARE),
        ("gemini", "google-generative-ai", f"{BARE}/v1beta"),
    ],
)
def test_pi_apis(plan: Callable[..., Plan], api: Any, called: str, url: str) -> None:
    harness = PiHarness(HarnessOptions(images=True, pi=PiOptions(api=api)))
    assert harness.dialect == api
    provider = json.loads(plan(harness).files["/home/agent/.pi/agent/models.json"])["providers"]["openforgerl"]
    assert (provider["api"], provider["baseUrl"], provider["apiKey"]) == (called, url, "the-key")
    assert provider["models"][0]["input"] == ["text", "image"]


@pytest.mark.parametrize("harness", ALL, ids=lambda harness: harness.name)
class TestEveryNpmHarness:
    def test_only_the_instruction_and_the_key_differ_between_rollouts(
        self, plan: Callable[..., Plan], harness: Harness
    ) -> None:
        def neutral(made: Plan, key: str, instruction: str) -> str:
            return repr(made).replace(key, "KEY").replace(instruction, "TASK")

        one = plan(harness, key="key-of-one", instruction="Do one.")
        two = plan(harness, key="key-of-two", instruction="Do two.")
        assert one != two
        assert neutral(one, "key-of-one", "Do one.") == neutral(two, "key-of-two", "Do two.")

    def test_the_key_is_on_no_command_line(self, plan: Callable[..., Plan], harness: Harness) -> None:
        assert not any("the-key" in word for word in plan(harness).argv)

    def test_a_dialect_that_is_not_served(self, plan: Callable[..., Plan], harness: Harness) -> None:
        with pytest.raises(InputError, match=rf"{harness.name} speaks '{harness.dialect}', .*served: \['other'\]"):
            plan(harness, base_urls={"other": "x"})

    def test_absent_it_names_the_install_command(self, tmp_path: Path, harness: Harness) -> None:
        absent = type(harness)(HarnessOptions(cache=str(tmp_path)))  # type: ignore[call-arg]
        with pytest.raises(InputError, match=f"run: openforgerl harness install {harness.name}"):
            absent.layers()
        with pytest.raises(InputError, match=f"openforgerl harness install {harness.name}"):
            absent.report()


def test_a_machine_without_a_program(plan: Callable[..., Plan]) -> None:
    with pytest.raises(InputError, match=r"opencode 1\.18\.33 runs on x86_64, not on aarch64"):
        plan(OpencodeHarness(machine="aarch64"))
