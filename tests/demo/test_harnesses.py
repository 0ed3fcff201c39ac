"""The demo behind codex and Claude Code: what the expert says, what the harness is told, how much is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.cli.configs import Chosen, resolve
from openforgerl.demo import bundle, families
from openforgerl.demo.pipeline import Demo, base_model
from openforgerl.demo.settings import SMALL_HARNESSES, DemoConfig, demo_defaults, small_note
from openforgerl.demo.teacher import script_for
from openforgerl.errors import ConfigError, TaskError
from openforgerl.harnesses.claude_code import ClaudeCodeHarness
from openforgerl.harnesses.codex import CodexHarness
from openforgerl.harnesses.options import PiOptions
from openforgerl.orchestrator.assembly import open_run
from openforgerl.protocols import Progress
from openforgerl.rendering import load_renderer
from openforgerl.types import HarnessContext, Rollout, Task

SHELLS = {"codex": ("exec_command", "cmd"), "claude-code": ("Bash", "command")}
SIZES = bundle.TASKS_PER_FAMILY
FOUR = {"copy", "delete", "rename", "sort"}


def config_of(harness: str, *settings: str) -> DemoConfig:
    config = resolve(DemoConfig, Chosen(None, settings, False), base=demo_defaults(harness))
    assert config is not None
    return config


class Quiet(Progress):
    """Nobody watches."""

    def start(self, stage: str, total: int, *, done: int = 0) -> None: ...

    def advance(self, stage: str, amount: int = 1, *, note: str | None = None) -> None: ...

    def finish(self, stage: str, *, note: str = "") -> None: ...

    def say(self, line: str) -> None: ...


async def demo_of(folder: Path, harness: str, *settings: str) -> Demo:
    config = config_of(harness, *settings)
    async with open_run(folder / harness, config) as opened:
        return Demo(opened, config, Quiet())


def context() -> HarnessContext:
    task = Task(name="t", digest="d", path="/nowhere", instruction="Copy a.txt to b.txt.")
    rollout = Rollout(
        rollout_id="r",
        run_id="run",
        task="t",
        task_digest="d",
        harness="x",
        group_id="g",
        index=0,
        seed=1,
        purpose="try",
    )
    return HarnessContext(
        task=task,
        rollout=rollout,
        base_urls=dict.fromkeys(("responses", "messages"), "http://127.0.0.1:8080/s/v1"),
        key="the-key",
        model="policy",
        context_length=4096,
        max_output_tokens=64,
        home="/home/agent",
        workdir="/workspace",
    )


@pytest.mark.parametrize("harness", SHELLS)
def test_the_expert_runs_the_same_commands_with_each_harness_s_own_shell_tool(harness: str) -> None:
    tool, parameter = SHELLS[harness]
    for place in bundle.plan():
        task = bundle.bundled_tasks() / place.name
        commands = [step.arguments["command"] for step in families.expert_steps(task, "react").steps]
        steps = families.expert_steps(task, harness).steps
        assert [(step.tool, step.arguments) for step in steps] == [(tool, {parameter: text}) for text in commands]


def test_a_written_text_becomes_an_echo_and_the_last_turn_is_words_alone() -> None:
    puzzle = families.build("write", "sft", 1000)
    path, text = puzzle.slots["a"], puzzle.slots["t"]
    answers = script_for(bundle.bundled_tasks() / "sft-write-00", "codex").answers
    assert [[(call.name, call.arguments) for call in answer.tool_calls] for answer in answers] == [
        [("exec_command", {"cmd": f"echo {text} > {path}"})],
        [],
    ]
    assert answers[-1].text == "Done."


def test_no_expert_speaks_for_an_unknown_harness() -> None:
    with pytest.raises(TaskError, match="no expert speaks the tools of 'opencode'"):
        families.expert_steps(bundle.bundled_tasks() / "sft-copy-00", "opencode")


def test_codex_is_told_to_keep_its_prompt_short() -> None:
    plan = CodexHarness(config_of("codex").harness, machine="x86_64").plan(context())
    overrides = [plan.argv[at + 1] for at, word in enumerate(plan.argv) if word == "-c"]
    assert tomllib.loads("\n".join(overrides)) == {
        "instructions": PiOptions().system_prompt,  # the words that the base model was made for
        "skills": {"include_instructions": False},
        "include_environment_context": False,
        "include_permissions_instructions": False,
        "tools": {"experimental_request_user_input": {"enabled": False}},
    }
    features = tomllib.loads(plan.files["/home/agent/.codex/config.toml"])["features"]
    assert not any(features[name] for name in ("goals", "view_image", "multi_agent"))


def test_claude_code_is_told_to_keep_its_prompt_short() -> None:
    argv = ClaudeCodeHarness(config_of("claude-code").harness, machine="x86_64").plan(context()).argv
    assert "--bare" in argv
    assert values_of(argv, "--tools") == ["Bash"]
    assert values_of(argv, "--system-prompt") == [PiOptions().system_prompt]


def values_of(argv: Sequence[str], flag: str) -> list[str]:
    return [argv[at + 1] for at, word in enumerate(argv) if word == flag]


@pytest.mark.parametrize("harness", SHELLS)
async def test_a_small_demo_is_small(harness: str, tmp_path: Path) -> None:
    demo = await demo_of(tmp_path, harness)
    measured = Counter(str(task.metadata["family"]) for task in demo.held_out())
    assert measured == dict.fromkeys(FOUR, 2)
    assert Counter(task.metadata["split"] for task in demo.held_out()) == {"heldout": 4, "heldout-phrasing": 4}
    assert Counter(task.metadata["family"] for task in demo.shown()) == dict.fromkeys(FOUR, SIZES["sft"] + 6)
    assert Counter(task.metadata["family"] for task in demo.practised()) == dict.fromkeys(FOUR, SIZES["rl"] - 6)
    used = [task.name for task in (*demo.shown(), *demo.practised(), *demo.held_out())]
    assert len(set(used)) == len(used)  # nothing is shown and practised, nothing measured was seen
    assert demo.config.train.steps <= 4
    assert "3 GRPO steps" in small_note(demo.config) and "copy, delete, rename, sort" in small_note(demo.config)


async def test_pi_s_demo_is_whole(tmp_path: Path) -> None:
    demo = await demo_of(tmp_path, "pi")
    assert len(demo.held_out()) == 12 * (SIZES["heldout"] + SIZES["heldout-phrasing"]) + 2 * SIZES["heldout-family"]
    assert len(demo.shown()) == 12 * SIZES["sft"] and len(demo.practised()) == 12 * SIZES["rl"]
    assert demo.base == base_model()
    assert small_note(demo.config) == ""


async def test_claude_code_s_model_is_served_with_a_longer_context(tmp_path: Path) -> None:
    demo = await demo_of(tmp_path, "claude-code")
    shipped = json.loads((base_model() / "config.json").read_text())
    served = json.loads((demo.base / "config.json").read_text())
    assert served == shipped | {"max_position_embeddings": 32_768}
    assert (demo.base / "model.safetensors").read_bytes() == (base_model() / "model.safetensors").read_bytes()
    assert demo.renderer.encode("cp a b") == load_renderer(base_model()).encode("cp a b")


async def test_tasks_can_be_cut_by_family_and_in_all(tmp_path: Path) -> None:
    demo = await demo_of(tmp_path, "react", 'demo.families=["line","copy-into"]', "demo.eval_per_family=2")
    names = [task.name.removeprefix("openforgerl-demo/") for task in demo.held_out()]
    assert names == [
        *("heldout-line-00", "heldout-line-01"),
        "heldout-phrasing-line-00",
        *("heldout-family-copy-into-00", "heldout-family-copy-into-01"),
    ]
    cut = await demo_of(tmp_path / "cut", "react", "demo.eval_tasks=1")
    assert len(cut.held_out()) == 3  # one of each split


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('demo.families=["nope"]', "families must be among copy, "),
        ('demo.families=["sum"]', "got sum"),  # bundled, but neither trained on nor measured
        ("demo.eval_per_family=0", "eval_per_family must be 1 or more; got 0"),
        ("demo.lent_per_family=-1", "lent_per_family must be 0 or more; got -1"),
        ("demo.sft_tasks=0", "sft_tasks must be 1 or more; got 0"),
    ],
)
def test_a_wrong_amount_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("codex", setting)


CUT_DOWN = (
    "sft.steps=2",
    "train.steps=1",
    "train.groups_per_step=1",
    "train.group_size=2",
    "demo.sft_tasks=1",
    "demo.lent_per_family=0",
    "demo.validation_tasks=1",
    "demo.eval_tasks=1",
)


@pytest.mark.slow
@pytest.mark.node
@pytest.mark.sandbox
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("harness", SMALL_HARNESSES)
def test_the_whole_demo_runs_in_the_real_harness(harness: str, tmp_path: Path) -> None:
    """Teacher, SFT, GRPO, three measurements and the report, in which every sampled token is accounted for."""
    named = os.environ.get("OPENFORGERL_CACHE")
    environment = {**os.environ, "OPENFORGERL_CACHE": named or str(Path(__file__).parents[2] / ".cache")}
    openforgerl = [sys.executable, "-c", "from openforgerl.cli.main import main; main()"]
    settings = [word for setting in CUT_DOWN for word in ("-s", setting)]

    def ran(*words: str) -> str:
        done = subprocess.run([*openforgerl, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    ran("harness", "install", harness)
    said = ran("demo", "--harness", harness, "--run", str(tmp_path), *settings)
    assert "A small run: 1 GRPO steps" in said
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["harness"]["name"] == harness
    assert report["sft"]["rollouts"] == 2  # the expert solved both tasks that it was given
    assert report["rl"]["rollouts"] == 2 and report["failures"]["train"]["graded"] == 2
    for account in report["tokens"].values():
        ended = account["trained"] + sum(account["masked"].values()) + sum(account["dropped"].values())
        assert account["sampled"] == ended > 0
    assert report["prompt_tokens"] < json.loads((base_model() / "config.json").read_text())["max_position_embeddings"]
    # Every GRPO token scored again by the weights that sampled it: float32 rounding is all that may differ.
    audit = msgspec.json.decode(ran("audit", str(tmp_path), "--json"))
    assert audit["findings"] == []
    (version,) = audit["rescored"]["versions"]
    assert version["tokens"] > 0 and version["max"] < 1e-3
