"""One registry for every plugin point: built-in map, then entry points, then `module:Attribute`.

This is the only lazy import in the house: naming a plugin must not cost its dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from openforgerl.errors import ConfigError

GROUP = "openforgerl.plugins"
"""Entry-point group; a name in it is `<point>.<plugin>`, e.g. `harness.mine`."""

BUILT_IN: dict[str, dict[str, str]] = {
    "engine": {
        "relay": "openforgerl.engines.relay:RelayEngine",
        "scripted": "openforgerl.engines.scripted:ScriptedEngine",
        "sglang": "openforgerl.engines.server_engine:SglangEngine",
        "vllm": "openforgerl.engines.server_engine:VllmEngine",
        "torch": "openforgerl.engines.torch_engine:TorchEngine",
    },
    "sandbox": {
        "process": "openforgerl.sandboxes.process:ProcessSandboxes",
        "container": "openforgerl.sandboxes.container:ContainerSandboxes",
        "kubernetes": "openforgerl.sandboxes.kubernetes.backend:KubernetesSandboxes",
        "fake": "openforgerl.testing.fake_sandbox:FakeSandboxes",
    },
    "reaping": {"kubernetes": "openforgerl.sandboxes.kubernetes.reaping:reap_expired"},
    "diagnosis": {"kubernetes": "openforgerl.sandboxes.kubernetes.diagnosis:examine"},
    "harness": {
        "pi": "openforgerl.harnesses.pi:PiHarness",
        "codex": "openforgerl.harnesses.codex:CodexHarness",
        "claude-code": "openforgerl.harnesses.claude_code:ClaudeCodeHarness",
        "opencode": "openforgerl.harnesses.opencode:OpencodeHarness",
        "qwen-code": "openforgerl.harnesses.qwen_code:QwenCodeHarness",
        "gemini-cli": "openforgerl.harnesses.gemini_cli:GeminiCliHarness",
        "mini-swe-agent": "openforgerl.harnesses.mini_swe_agent:MiniSweAgentHarness",
        "openclaw": "openforgerl.harnesses.openclaw:OpenclawHarness",
        "openhands": "openforgerl.harnesses.openhands:OpenhandsHarness",
        "zeroclaw": "openforgerl.harnesses.zeroclaw:ZeroclawHarness",
        "react": "openforgerl.harnesses.react:ReactHarness",
        "command": "openforgerl.harnesses.command:CommandHarness",
    },
    "renderer": {
        "template": "openforgerl.rendering.renderer:ChatRenderer",
        "package": "openforgerl.rendering.packaged:PackagedRenderer",
    },
    "verifier": {"script": "openforgerl.verifiers.script:ScriptVerifier"},
    "model": {"tiny": "openforgerl.testing.tiny_model:write_tiny_model"},
    "adapter": {"lora": "openforgerl.training.lora:LoraAdapter"},
    "rescoring": {"torch": "openforgerl.training.rescoring:rescore"},
    "format": {
        "token-rows-jsonl": "openforgerl.formats.token_rows:TokenRowsJsonl",
        "token-rows-parquet": "openforgerl.formats.parquet:TokenRowsParquet",
        "openai-jsonl": "openforgerl.formats.openai_jsonl:OpenAiJsonl",
        "trl": "openforgerl.formats.trainers:TrlRows",
        "verl-sft": "openforgerl.formats.parquet:VerlSft",
        "slime": "openforgerl.formats.trainers:SlimeSamples",
        "openrlhf": "openforgerl.formats.trainers:OpenRlhfSamples",
        "atif": "openforgerl.formats.atif:AtifDocuments",
    },
    "verb": {
        verb: f"openforgerl.cli.{module}:{verb}"
        for verb, module in {
            "demo": "demo",
            "proxy": "proxy",
            "run": "running",
            "eval": "evaluating",
            "train": "train",
            "tasks": "tasks",
            "harness": "harness",
            "images": "images",
            "show": "show",
            "export": "export",
            "audit": "audit",
            "replay": "replay",
            "reap": "reap",
            "doctor": "doctor",
            "testing": "testing",
        }.items()
    },
}


def names(point: str) -> list[str]:
    """Every known plugin of a point, built-in and installed."""
    return sorted({*BUILT_IN.get(point, {}), *_installed(point)})


def load(point: str, name: str) -> Any:
    """The class or function called `name` at plugin point `point`, or given as `module:Attribute`."""
    target = BUILT_IN.get(point, {}).get(name) or _installed(point).get(name) or (name if ":" in name else None)
    if target is None:
        raise ConfigError(f"unknown {point} {name!r}; known: {', '.join(names(point))}, or give module:Attribute")
    module_name, _, attribute = target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{point} {name!r} needs {error.name or module_name}, which is not installed: {error}"
        ) from error
    except ImportError as error:
        raise ConfigError(f"{point} {name!r} cannot be loaded: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{point} {name!r}: module {module_name} has no {attribute!r}") from error


def _installed(point: str) -> dict[str, str]:
    found: Iterable[Any] = entry_points(group=GROUP)
    prefix = point + "."
    return {entry.name[len(prefix) :]: entry.value for entry in found if entry.name.startswith(prefix)}
