"""The real codex, claude-code, opencode, qwen-code, gemini-cli and pi (in each API) in the sandbox, against the real
proxy: only the model is scripted. Every sampled token of an ordinary task is trained, in one thread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl import plugins
from openforgerl.harnesses import observed_user_agents
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.recipes import RECIPES
from openforgerl.protocols import Harness
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Limits, Message, ModelCall, Reasoning, Text

from .real_agents import Ran, cached, run_agent

pytestmark = [pytest.mark.node, pytest.mark.sandbox, pytest.mark.timeout(600)]
CHAT, RESPONSES, MESSAGES, GEMINI = "chat", "responses", "messages", "gemini"
SHELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "codex": ("exec_command", "cmd", {}),
    "claude-code": ("Bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Work."}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
    "gemini-cli": ("run_shell_command", "command", {}),
    "pi": ("bash", "command", {}),
}
"""Harness → its shell tool, the argument that takes the command, and what else it wants."""
SLOW = pytest.mark.slow
AGENTS = [
    pytest.param("codex", {}, RESPONSES, id="codex"),
    pytest.param("claude-code", {}, MESSAGES, id="claude-code"),
    pytest.param("gemini-cli", {}, GEMINI, id="gemini-cli"),
    pytest.param("qwen-code", {}, CHAT, id="qwen-code"),
    pytest.param("opencode", {}, CHAT, id="opencode", marks=SLOW),
    pytest.param("opencode", {"opencode": {"api": "responses"}}, RESPONSES, id="opencode-responses", marks=SLOW),
    pytest.param("opencode", {"opencode": {"api": "messages"}}, MESSAGES, id="opencode-messages", marks=SLOW),
    pytest.param("pi", {"pi": {"api": "responses"}}, RESPONSES, id="pi-responses"),
    pytest.param("pi", {"pi": {"api": "messages"}}, MESSAGES, id="pi-messages"),
    pytest.param("pi", {"pi": {"api": "gemini"}}, GEMINI, id="pi-gemini"),
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def opened(name: str, options: dict[str, Any], cache: Path) -> Harness:
    settings = msgspec.convert({"cache": cached(cache, name), **options}, HarnessOptions)
    harness: Harness = plugins.load("harness", name)(settings)
    return harness


def shell(name: str, command: str) -> dict[str, Any]:
    tool, argument, more = SHELLS[name]
    return {"name": tool, "arguments": {argument: command, **more}}


def spans(ran: Ran) -> list[list[int]]:
    """Lengths of the trained spans, sample by sample."""
    return [[span["stop"] - span["start"] for span in sample["spans"]] for sample in ran.samples["samples"]]


def results(call: ModelCall) -> str:
    """The text of the conversation's last message: what the harness gave back for a tool call."""
    last: Message = call.conversation.messages[-1]
    return json.dumps(msgspec.to_builtins(last))


@pytest.mark.parametrize(("name", "options", "dialect"), AGENTS)
async def test_a_task_of_several_calls(
    name: str, options: dict[str, Any], dialect: str, tmp_path: Path, harness_cache: Path, renderer: ChatRenderer
) -> None:
    harness = opened(name, options, harness_cache)
    assert harness.dialect == dialect
    ran = await run_agent(
        tmp_path,
        renderer,
        harness,
        {"reasoning": "First copy.", "text": "I copy. ", "tool_calls": [shell(name, "cp a.txt b.txt && id -u")]},
        {"tool_calls": [shell(name, "cat b.txt; pwd")]},
        {"text": "Done."},
        timeout=540,  # opencode takes 12 CPU seconds, which a busy machine makes minutes of
    )
    assert ran.files == {"/workspace/b.txt": b"hello\n"}, ran.said
    assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (0, "finished", True), ran.said
    assert len(ran.calls) == 3, [call.error for call in ran.calls]
    assert {(call.dialect, call.thread, str(call.role)) for call in ran.calls} == {(dialect, "main", "main")}
    (agent,) = observed_user_agents(ran.calls)
    assert agent.startswith(RECIPES[name].user_agent)
    # The instruction arrives whole, the tools' outputs come back, and the work directory is the sandbox's.
    first = json.dumps(msgspec.to_builtins(ran.calls[0].conversation.messages))
    assert "Copy a.txt to b.txt." in first
    assert "hello" in results(ran.calls[2])
    assert "/workspace" in results(ran.calls[2])
    # Each prompt is the one before, what was sampled after it, and more: nothing was encoded anew.
    for before, after in zip(ran.calls, ran.calls[1:], strict=False):
        body = before.sampled_ids[:-1]  # the stop token is the template's own closing
        known = (*before.prompt.ids, *body)
        assert after.prompt.ids[: len(known)] == known
        assert after.parent_call_id == before.call_id
    lengths = [len(call.sampled_ids) for call in ran.calls]
    assert spans(ran) == [lengths]
    assert ran.samples["totals"] == {"sampled": sum(lengths), "trained": sum(lengths), "masked": {}, "dropped": {}}
    # A thought that was sent comes back with the history, where the harness keeps it at all.
    echoed = [part for message in ran.calls[2].conversation.messages for part in message.parts]
    assert any(isinstance(part, Reasoning) and part.text == "First copy." for part in echoed)


@pytest.mark.parametrize("name", ["codex", "claude-code", "gemini-cli", "qwen-code"])
async def test_a_used_up_session_is_a_limit(
    name: str, tmp_path: Path, harness_cache: Path, renderer: ChatRenderer
) -> None:
    ran = await run_agent(
        tmp_path,
        renderer,
        opened(name, {}, harness_cache),
        {"tool_calls": [shell(name, "cp a.txt b.txt")]},
        {"text": "Done."},
        limits=Limits(calls=1),
    )
    assert ran.exit.code not in {0, None}
    assert (ran.ending.kind, ran.ending.by_policy) == ("limit", True), ran.said
    assert "session budget" in ran.ending.evidence
    assert ran.files == {"/workspace/b.txt": b"hello\n"}


@pytest.mark.parametrize("name", ["codex", "claude-code"])
async def test_an_answer_cut_at_its_length(
    name: str, tmp_path: Path, harness_cache: Path, renderer: ChatRenderer
) -> None:
    cut = {"text": "Half a", "finish_reason": "length"}
    ran = await run_agent(tmp_path, renderer, opened(name, {}, harness_cache), *[cut] * 6)
    assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (1, "limit", True), ran.said


@pytest.mark.parametrize(
    "instruction", ["@a.txt is a name", "/workspace/a.txt is a path", "-p is a flag", '"é ☃"\n\nand a second line']
)
@pytest.mark.parametrize("name", ["codex", "claude-code"])
async def test_any_instruction_arrives_whole(
    name: str, instruction: str, tmp_path: Path, harness_cache: Path, renderer: ChatRenderer
) -> None:
    ran = await run_agent(
        tmp_path, renderer, opened(name, {}, harness_cache), {"text": "Done."}, instruction=instruction
    )
    assert ran.ending.kind == "finished", ran.said
    parts = [part for message in ran.calls[0].conversation.messages for part in message.parts]
    assert any(part.text.strip() == instruction for part in parts if isinstance(part, Text))


async def test_what_a_run_puts_on_record(harness_cache: Path) -> None:
    harness = opened("codex", {}, harness_cache)
    (layer,) = harness.layers()  # a program of its own: no Node
    report = harness.report()
    recipe = RECIPES["codex"]
    assert (report["version"], report["package"]) == ("0.171.0", "@openai/codex")
    assert report["package_digest"] == recipe.package_digest
    assert report["binary_digest"] in {binary.digest for binary in recipe.binaries.values()}
    assert report["tree_digest"] == layer.digest
    assert (layer.target, Path(layer.source).name[:14]) == ("/opt/codex", "codex-0.171.0-")
