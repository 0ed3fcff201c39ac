"""Every verb says what it does and refuses wrong input in one line, with exit code 2 and never a traceback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
from pathlib import Path
from typing import Any

import click
import pytest

from openforgerl.cli.interruption import terminate_like_interrupt
from openforgerl.cli.main import VERBS, cli, main
from openforgerl.cli.reference import commands, reference
from openforgerl.errors import StoreError
from openforgerl.store import Database, RunStore
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Attempt, Rollout

ROOT = Path(__file__).parents[2]
TASK = ROOT / "src/openforgerl/demo/tasks/rl-copy-00"
FLAGS_PER_VERB = 8
COMMANDS = dict(commands())


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `openforgerl WORDS`, in this process."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that refuses `openforgerl WORDS` as wrong input."""
    code, _, err = ran(capsys, *words)
    assert code == 2, err
    assert err.startswith("Error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run_words(tmp_path: Path, tiny: Path) -> list[object]:
    """`openforgerl run` with nothing wrong; what follows overrides it."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"text": "Done.\x1b[2J"}]}))
    words = ["run", TASK, "--engine", f"scripted:{script}", "--tokenizer", tiny, "--harness", "react"]
    return [*words, "--run", tmp_path / "run"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_first_sentence_is_its_line_in_the_table(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None and command.help
    said = " ".join(command.help.split())
    expected = {
        "eval": "Measure a model on the Harbor task directory TASKS",
        "run": "Run the Harbor task directory TASKS",
        "show": "Show RUN: a summary and its attempts",
    }.get(verb, VERBS[verb])
    assert said.startswith(expected)


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS), *(words.split() for words in COMMANDS)])
def test_help_works(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, *words, "--help")
    assert code == 0 and err == ""
    assert out.startswith(" ".join(["Usage: openforgerl", *words]))


@pytest.mark.parametrize("words", COMMANDS)
def test_a_verb_has_few_flags_and_each_says_what_it_does(words: str) -> None:
    options = [parameter for parameter in COMMANDS[words].params if isinstance(parameter, click.Option)]
    assert len(options) <= FLAGS_PER_VERB
    undocumented = [option.opts[-1] for option in options if not option.help]
    assert undocumented == []


def test_help_says_what_is_needed_and_where_the_harnesses_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch, transformers" not in ran(capsys, "testing", "tiny-model", "--help")[1]
    for words in ("run", "eval", "train grpo"):
        assert "openforgerl harness list" in " ".join(ran(capsys, *words.split(), "--help")[1].split())


def test_the_reference_is_what_the_commands_say() -> None:
    assert (ROOT / "docs/cli.md").read_text() == reference()


def test_readme_names_only_verbs_and_flags_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    lines = [line.partition("#")[0] for line in re.findall(r"^(?:\S*/)?openforgerl (.+)$", text, re.MULTILINE)]
    lines += re.findall(r"`(?:\S*/)?openforgerl ([^`]+)`", text)
    assert len(lines) >= 7
    for line in lines:
        words = line.split()
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
        assert name is not None, line
        known = {flag for option in COMMANDS[name].params for flag in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known, line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["run"], "Missing argument 'TASKS'"),
        (["run", "/nonexistent"], "'/nonexistent' does not exist"),
        (["run", TASK], "--engine torch:DIR, vllm:URL[,URL], sglang:URL"),
        (["run", TASK, "--engine", "scripted"], "KIND:PATH"),
        (["run", TASK, "--engine", "scripted:x"], "--tokenizer DIR"),
        (["eval", TASK, "-s", "attempts=0"], "attempts must be 1 or more"),
        (["train", "grpo", TASK], "--model DIR"),
        (["train", "sft"], "--model"),
        (["train", "sft", ".", "--model", ".", "--out", "x"], "has no run.sqlite"),
        (["show", "."], "has no run.sqlite"),
        (["show", "/nonexistent"], "'/nonexistent' does not exist"),
        (["tasks", "check", "docs"], "docs holds no task"),
        (["tasks", "list", "docs"], "docs holds no task"),
        (["tasks", "show", "docs"], "task.toml is missing"),
        (["harness", "install", "bogus"], "'bogus'"),
        (["testing", "tiny-model", "README.md"], "README.md"),
        (["testing", "tiny-model", "/nonexistent/x", "--seed", "-5"], "--seed"),
        (["testing", "tiny-model", "README.md/x"], "README.md/x"),
        (["doctor", "x"], "unexpected extra argument"),
        (["demo", "--seeds", "0"], "--seeds"),
        (["demo", "--dry-run", "-s", "nope=1"], "nope"),
        (["proxy"], "--engine"),
        (["proxy", "--engine", "scripted:x", "--port", "70000"], "--port"),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: list[object], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("attempts=0", "attempts must be 1 or more; got 0"),
        ("tasks.limit=0", "tasks.limit must be 1 or more"),
        ("tasks.split=nope", "tasks.split = 'nope'"),
        ("limits.memory_mb=-5", "limits.memory_mb must be 1 or more; got -5"),
        ("limits.bogus=3", "known: memory_mb"),
        ("run.concurency=3", "did you mean 'concurrency'?"),
        ("run.concurrency=many", "$.run.concurrency"),
        ("run=3", "$.run"),
        ("run.concurrency", "section.key=value"),
        ("backend=nope", "unknown sandbox 'nope'"),
        ("sandbox.bwrap=/nope", "sandbox.bwrap"),
        ("harness.name=nope", "unknown harness 'nope'"),
        ("harness.name=json:loads", "'json:loads' is no harness class"),
        ("sandbox.cgroups=maybe", "accepted: auto, off, require"),
        ("rollout.on_timeout=maybe", "accepted: "),
        ("harness.name=command", "harness.command.argv is empty"),
        ("engine.kind=nope", "unknown engine 'nope'"),
        ("engine.path=/nope.json", "/nope.json"),
        ("tokenizer=/nope", "/nope"),
    ],
)
def test_a_wrong_setting_is_refused_and_leaves_the_run_folder_free(
    setting: str, said: str, run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert said in refused(capsys, *run_words, "-s", setting)
    assert not (tmp_path / "run").exists(), "the corrected command would be refused as another config"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x = [", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[run]\nconcurrency = 'two'\n", "$.run.concurrency"),
        (b"[rum]\n", "did you mean 'run'?"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(
    content: bytes, said: str, run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    line = refused(capsys, *run_words, "--config", file)
    assert said in line and str(file) in line
    assert "cannot read config" in refused(capsys, *run_words, "--config", tmp_path / "absent.toml")


def test_a_run_folder_that_cannot_be_made_or_has_another_config_is_refused(
    run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "run"):
        line = refused(capsys, *run_words, "--run", bad)
        assert str(bad) in line and "--run" in line
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    line = refused(capsys, *run_words)
    assert "another config" in line and "--dry-run" in line


def test_a_folder_of_another_user_is_refused(
    run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    assert "cannot be written by this user" in refused(capsys, *run_words)


@pytest.mark.parametrize("which", ["--port", "--control-port"])
def test_an_occupied_port_is_refused_by_number(
    which: str, tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"answers": []}))
    words: list[object] = ["proxy", "--engine", f"scripted:{tmp_path / 'script.json'}", "--tokenizer", tiny]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": 0, "--control-port": 0, which: port}
        flags = [word for pair in ports.items() for word in pair]
        line = refused(capsys, *words, *flags, "--run", tmp_path / "run")
    assert str(port) in line and "port 0" in line


@pytest.mark.parametrize("damage", ["text", "version"])
def test_a_damaged_or_foreign_database_is_failed_work(
    damage: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.sqlite"
    if damage == "text":
        file.write_text("no database " * 100)
    else:
        with sqlite3.connect(file) as connection:
            connection.execute("PRAGMA user_version = 99")
    code, _, err = ran(capsys, "show", tmp_path)
    assert code == 1 and str(file) in err and err.count("\n") == 1


def test_the_first_error_of_a_task_group_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise ExceptionGroup("inner", [ExceptionGroup("group", [StoreError("the disk is full")])])

    monkeypatch.setattr(cli, "main", fail)
    assert ran(capsys) == (1, "", "Error: StoreError: the disk is full\n")


def test_without_a_home_directory_the_cache_must_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OPENFORGERL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)  # as for a user id that /etc/passwd does not list
    assert "OPENFORGERL_CACHE" in refused(capsys, "harness", "list")


def test_sigterm_interrupts_long_work_outside_an_event_loop() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_like_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ExceptionGroup("group", [ZeroDivisionError()])

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(ExceptionGroup):
        main([])


def test_dry_run_prints_json_and_touches_nothing(
    run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = ran(capsys, *run_words, "-s", "run.concurrency=7", "--dry-run")
    assert code == 0 and json.loads(out)["run"]["concurrency"] == 7
    assert not (tmp_path / "run").exists()


def test_a_flag_wins_over_the_file_and_a_setting_over_both(
    run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("attempts = 5\n[harness]\nname = 'pi'\n[tasks]\npath = '/elsewhere'\n")
    words = [*run_words, "-s", "attempts=4", "--config", tmp_path / "mine.toml", "--dry-run"]
    config = json.loads(ran(capsys, *words)[1])
    assert (config["attempts"], config["harness"]["name"], config["tasks"]["path"]) == (4, "react", str(TASK))
    assert json.loads(ran(capsys, *words, "-s", "attempts=3")[1])["attempts"] == 3


def test_tasks_check_tells_a_bad_task_from_good_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "task.toml").write_text("x = [")
    code, out, _ = ran(capsys, "tasks", "check", tmp_path)
    assert code == 1 and "bad: error" in out and "1 task directories, 1 errors" in out
    assert ran(capsys, "tasks", "check", TASK)[0] == 0


@pytest.mark.parametrize("verb", ["list", "show"])
def test_a_tasks_text_is_neither_markup_nor_control(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = tmp_path / "task"
    shutil.copytree(TASK, task)
    (task / "instruction.md").write_text("Fix [/red] in \x1b[2J[bold]x\n")
    code, out, err = ran(capsys, "tasks", verb, task)
    assert code == 0, err
    assert "Fix [/red] in ␛[2J[bold]x" in out and "\x1b" not in out


async def _record(path: Path, task: str) -> None:
    async with Database.open(path) as database:
        store = RunStore(database)
        await store.put_run("run", "digest")
        rollout = Rollout(
            rollout_id="r0",
            run_id="run",
            task=task,
            task_digest="d",
            harness="react",
            group_id="g",
            index=0,
            seed=0,
            purpose="[/x]",
        )
        await store.plan([rollout])
        await store.begin_attempt(Attempt(attempt_id="r0-a0", rollout_id="r0", number=0, started_at=0.0))


def test_a_runs_names_are_neither_markup_nor_control(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asyncio.run(_record(tmp_path / "run.sqlite", "[/red]\x1b[2J"))
    code, out, err = ran(capsys, "show", tmp_path)
    assert code == 0, err
    assert "[/red]␛[2J" in out and "[/x]" in out and "\x1b" not in out


def test_a_run_is_shown(run_words: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = ran(capsys, *run_words)
    assert code == 0, err
    attempt = next(word for word in out.split() if word.startswith("run-0-rl-copy-00-"))
    assert attempt in ran(capsys, "show", tmp_path / "run")[1], "in one piece, to copy"
    assert "⟦Done.␛[2J" in ran(capsys, "show", tmp_path / "run", attempt)[1], "an agent cannot move the cursor"
    assert "no attempt 'nope'" in refused(capsys, "show", tmp_path / "run", "nope")
    assert "another config" in refused(capsys, *run_words, "-s", "attempts=2")


def test_one_text_says_how_a_model_is_read_wherever_it_is_said(
    run_words: list[object], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "answers are read as hermes"
    hint = (
        "; prompts by the model's own chat template [others: -s proxy.answer_form=NAME, -s proxy.prompt_package=NAME]"
    )

    def told(text: str) -> str:
        (line,) = [line for line in text.splitlines() if said in line]
        return line[line.index(said) :]

    _, out, _ = ran(capsys, "doctor", "--model", tiny)
    assert told(out).endswith(hint)
    for words in (["-s", f"tokenizer={tiny}"], ["-s", f"engine.path={tiny}"]):
        assert told(ran(capsys, "doctor", *words)[1]) == told(out)
    assert told(ran(capsys, *run_words)[2]) == told(out)
    _, out, _ = ran(capsys, "doctor", "--model", tiny, "-s", "proxy.answer_form=glm")
    assert "answers are read as glm, thoughts in <think> (named by the configuration); prompts by" in out
    assert said not in ran(capsys, "doctor")[1]
    code, out, _ = ran(capsys, "doctor", "--model", tiny, "-s", "proxy.answer_form=nope")
    assert code == 1 and "answer form 'nope' is unknown; known are auto, hermes" in out


def test_a_template_that_shows_no_tools_is_said(tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    refusing = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    blind = "; prompts by the model's own chat template, which never tells the model of its tools [others: "
    for name, template, said in (
        ("plain", plain, True),
        ("shown", shown + plain, False),
        ("no", refusing + plain, True),
    ):
        model = tmp_path / name
        shutil.copytree(tiny, model)
        (model / "chat_template.jinja").write_text(template)
        out = ran(capsys, "doctor", "--model", model)[1]
        assert "answers are read as plain" in out and (blind in out) == said, (name, out)
