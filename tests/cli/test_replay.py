"""`openforgerl replay`, with real harnesses in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from openforgerl.cli.main import main
from openforgerl.harnesses import install
from openforgerl.store import Database, RunStore
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import ModelCall

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"
LOOK = {
    "reasoning": "I look first.",
    "text": "Let me see.",
    "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}],
}
COPY = {"tool_calls": [{"name": "bash", "arguments": {"command": "cp *.csv copy; id -u"}}]}
DONE = {"text": "Done."}


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert said.err == "" or words[0] == "run", said.err
    assert isinstance(left.value.code, int)
    return left.value.code, said.out


def calls_of(folder: Path, attempt: str) -> list[ModelCall]:
    async def read() -> list[ModelCall]:
        database = Database.read_only(folder / "run.sqlite")
        try:
            return await RunStore(database).calls(attempt)
        finally:
            await database.close()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def record(
    capsys: pytest.CaptureFixture[str], place: Path, tiny: Path, harness: str, answers: list[dict[str, Any]]
) -> tuple[Path, str]:
    """A run of one rollout, and its rollout's id."""
    script = place / "script.json"
    script.write_text(json.dumps({"answers": answers}))
    folder = place / "recorded"
    words = ("--engine", f"scripted:{script}", "--tokenizer", tiny, "--harness", harness, "--run", folder)
    ran(capsys, "run", TASK, *words)
    return folder, rollout_of(folder)


def rollout_of(folder: Path) -> str:
    async def read() -> str:
        database = Database.read_only(folder / "run.sqlite")
        try:
            (rollout,) = await RunStore(database).rollouts()
            return rollout.rollout_id
        finally:
            await database.close()

    return asyncio.run(read())


@pytest.fixture
def react(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path) -> tuple[Path, str]:
    return record(capsys, tmp_path, tiny, "react", [LOOK, COPY, DONE])


pytestmark = pytest.mark.sandbox


def test_the_same_harness_asks_the_same_and_is_answered_token_by_token(
    capsys: pytest.CaptureFixture[str], react: tuple[Path, str], tmp_path: Path
) -> None:
    folder, rollout = react
    code, out = ran(capsys, "replay", folder, rollout, "--run", tmp_path / "again")
    assert code == 0, out
    assert [line for line in out.splitlines() if line.startswith("call")] == [
        f"call {n}   main: same" for n in range(3)
    ]
    assert f"{rollout}-a0: 3 calls, 3 compared with the record: all as recorded" in out
    then, now = calls_of(folder, f"{rollout}-a0"), calls_of(tmp_path / "again", f"{rollout}-a0")
    assert [(call.prompt.ids, call.sampled_ids) for call in now] == [
        (call.prompt.ids, call.sampled_ids) for call in then
    ]
    assert then[0].call_id != now[0].call_id  # so the tool calls' ids differ, and that is no difference


def test_a_folder_that_holds_a_replay_is_refused(
    capsys: pytest.CaptureFixture[str], react: tuple[Path, str], tmp_path: Path
) -> None:
    """The rollout is finished there, so nothing would run, and the old comparison would be told as the new one."""
    folder, rollout = react
    assert ran(capsys, "replay", folder, rollout, "--run", tmp_path / "again")[0] == 0
    for words in ((), ("--fork", "1")):
        with pytest.raises(SystemExit) as left:
            main(["replay", str(folder), rollout, "--run", str(tmp_path / "again"), *words])
        assert left.value.code == 2
        assert "holds a replay of this rollout already" in capsys.readouterr().err


def test_another_sampling_is_a_difference(capsys: pytest.CaptureFixture[str], react: tuple[Path, str]) -> None:
    folder, rollout = react
    code, out = ran(capsys, "replay", folder, rollout, "-s", "rollout.max_output_tokens=77")
    assert code == 1
    assert out.count("differs at max_tokens (sampling_changed): '4096' became '77'") == 3


def test_another_system_prompt_is_named_at_every_call(
    capsys: pytest.CaptureFixture[str], react: tuple[Path, str]
) -> None:
    folder, rollout = react
    setting = "harness.react.system_prompt=You are an agent in a Linux shell."
    code, out = ran(capsys, "replay", folder, f"{rollout}-a0", "-s", setting)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("call")]
    assert lines[0] == (
        "call 0   main: differs at messages[0] (system_prompt_changed): "
        "'gent in a Linux terminal. Use the bash tool, the…' became 'gent in a Linux shell.'"
    )
    assert len(lines) == 3 and all("system_prompt_changed" in line for line in lines)
    assert "3 calls, 3 compared with the record: 3 differ" in out


def test_calls_that_are_not_asked_again_are_named(capsys: pytest.CaptureFixture[str], react: tuple[Path, str]) -> None:
    folder, rollout = react
    code, out = ran(capsys, "replay", folder, rollout, "--json", "-s", "harness.react.max_turns=1")
    report = json.loads(out)
    assert code == 1
    assert [call["state"] for call in report["replay"]["calls"]] == ["same"]
    then = calls_of(folder, f"{rollout}-a0")
    assert report["replay"]["not_asked"] == [call.call_id for call in then[1:]]


def test_a_call_beyond_the_record_is_refused_and_named(
    capsys: pytest.CaptureFixture[str], react: tuple[Path, str], tmp_path: Path, tiny: Path
) -> None:
    """The recorded harness stopped after one turn; today's goes on."""
    script = tmp_path / "script.json"
    short = tmp_path / "short"
    words = ("--engine", f"scripted:{script}", "--tokenizer", tiny, "--harness", "react", "--run", short)
    ran(capsys, "run", TASK, *words, "-s", "harness.react.max_turns=1")
    code, out = ran(capsys, "replay", short, rollout_of(short), "-s", "harness.react.max_turns=9")
    assert code == 1
    assert "call 0   main: same" in out
    assert "call 1   main: not in the record" in out


def test_what_was_cut_is_cut_again(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path) -> None:
    """The engine broke in the middle of an answer; the harness asked again."""
    broken = {**COPY, "cut_after_tokens": 3}
    folder, rollout = record(capsys, tmp_path, tiny, "react", [LOOK, broken, COPY, DONE])
    then = calls_of(folder, f"{rollout}-a0")
    assert [call.status.value for call in then][:2] == ["complete", "error"]
    code, _ = ran(capsys, "replay", folder, rollout, "--run", tmp_path / "again")
    now = calls_of(tmp_path / "again", f"{rollout}-a0")
    assert [(call.status, call.sampled_ids) for call in now] == [(call.status, call.sampled_ids) for call in then]
    assert code == 0


TALKER = """
import json, sys, urllib.request
messages = [dict(role="user", content="Talk.")]
for turn in range(4):
    body = json.dumps(dict(model="m", max_tokens=12, messages=messages)).encode()
    head = {{"authorization": "Bearer {key}", "content-type": "application/json"}}
    answer = json.load(urllib.request.urlopen(urllib.request.Request("{base_url}/chat/completions", body, head)))
    messages += [answer["choices"][0]["message"], dict(role="user", content="And?")]
"""
"""A harness that talks on whatever the model says."""


def test_a_fork_goes_on_live(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path) -> None:
    """Same model, same seed: from the fork on it says what it said then. Another seed: something else."""
    folder, config = tmp_path / "recorded", tmp_path / "talker.toml"
    config.write_text(f"[harness.command]\nargv = ['/usr/bin/python3', '-c', '''{TALKER}''']\n")
    ran(capsys, "run", TASK, "--engine", f"torch:{tiny}", "--harness", "command", "--run", folder, "-c", config)
    rollout = rollout_of(folder)
    then = calls_of(folder, f"{rollout}-a0")
    assert len(then) == 4
    code, out = ran(capsys, "replay", folder, rollout, "--fork", 2, "--run", tmp_path / "same")
    assert code == 0
    assert out.count(": same") == 2 and out.count(": answered live") == 2
    now = calls_of(tmp_path / "same", f"{rollout}-a0")
    assert [call.sampled_ids for call in now] == [call.sampled_ids for call in then]
    assert now[3].logprobs is not None
    code, _ = ran(capsys, "replay", folder, rollout, "--fork", 2, "--seed", 12345, "--run", tmp_path / "other")
    other = calls_of(tmp_path / "other", f"{rollout}-a0")
    assert code == 0
    assert [call.sampled_ids for call in other[:2]] == [call.sampled_ids for call in then[:2]]
    assert other[2].prompt.ids == then[2].prompt.ids and other[2].sampled_ids != then[2].sampled_ids


@pytest.mark.node
def test_pi(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path(os.environ.get("OPENFORGERL_CACHE") or ROOT / ".cache")
    install("pi", cache, lambda line: print(line))
    capsys.readouterr()
    monkeypatch.setenv("OPENFORGERL_CACHE", str(cache))
    folder, rollout = record(capsys, tmp_path, tiny, "pi", [LOOK, COPY, DONE])
    code, out = ran(capsys, "replay", folder, rollout)
    assert code == 0, out
    assert [line for line in out.splitlines() if line.startswith("call")] == [
        f"call {n}   main: same" for n in range(3)
    ]
    code, out = ran(capsys, "replay", folder, rollout, "-s", 'harness.pi.tools=["bash"]')
    assert code == 1
    assert "call 0   main: differs at tools (tools_changed): 'read, write' became ''" in out


def test_what_cannot_be_replayed_is_refused(capsys: pytest.CaptureFixture[str], react: tuple[Path, str]) -> None:
    folder, rollout = react
    for words, said in (
        ((folder, rollout, "--fork", "4"), "the record has 3 calls"),
        ((folder, "r9"), "has no rollout or attempt 'r9'"),
        ((folder, rollout, "-s", "tasks.path=docs"), "holds no task"),
        ((folder, rollout, "-s", "tasks.path="), "names no tasks"),
        ((folder.parent, rollout), "is no run folder"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["replay", *map(str, words)])
        assert left.value.code == 2
        assert said in capsys.readouterr().err
