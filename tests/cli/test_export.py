"""`openforgerl export` and `train sft --data`, as a user types them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from openforgerl.cli.main import main
from openforgerl.formats.token_rows import read_token_rows
from openforgerl.testing.tiny_model import write_tiny_model

from .recorded_run import FAILED, make_run, record


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", tiny)


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `openforgerl WORDS`, in this process."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err


def test_every_graded_attempt_is_written_and_the_others_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    code, said, _ = ran(capsys, "export", folder, "--format", "token-rows-jsonl", "--out", out)
    rows = read_token_rows(out)
    assert code == 0
    assert {(row.attempt_id, row.reward) for row in rows} == {
        ("r0-a0", 1.0),
        ("r1-a1", 0.0),
        ("r2-a0", 1.0),
        ("r4-a0", 0.5),
    }
    assert f"{len(rows)} rows of 4 attempts" in said
    assert "attempts left out: 1 failed\n" in said
    assert "attempts left out: 1 failed and tried again" in said
    assert "not in" not in said


def test_purpose_and_only_passed_select(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    words = ("export", folder, "--format", "trl", "--out", out, "--purpose", "train", "--only-passed")
    code, said, _ = ran(capsys, *words)
    assert code == 0 and "of 2 attempts" in said
    assert "attempts left out: 1 not passed" in said
    assert "not in trl: 2 rewards (one per row)" in said
    assert len(out.read_text().splitlines()) == 2


def test_texts_come_from_the_tokenizer_kept_with_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = ran(capsys, "export", folder, "--format", "slime", "--out", tmp_path / "0.pt")
    assert code == 0 and "not in slime" not in said
    samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
    assert samples[0]["prompt"].startswith("<|im_start|>system\nBe good.<|im_end|>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "trl"), "Missing option '--out'"),
        (("--out", "x"), "Missing option '--format'"),
        (("--out", "x", "--format", "csv"), "'csv' is not one of 'atif'"),
        (("--out", "x", "--format", "trl", "--purpose", "rl"), "no rollouts of purpose 'rl'; it has train, eval:base"),
    ],
)
def test_wrong_words_are_refused(
    words: tuple[str, ...],
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = ran(capsys, "export", folder, *words)
    assert code == 2 and said in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_export_is_said_and_writes_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    asyncio.run(record(run, tiny, [("move", "train", (FAILED, FAILED)), ("copy", "train", ())]))
    code, _, err = ran(capsys, "export", run, "--format", "trl", "--out", tmp_path / "deep" / "rows.jsonl")
    assert code == 2 and f"{run} has nothing to export" in err
    assert "attempts left out: 1 failed, 1 failed and tried again, 1 planned, never begun" in err
    assert not (tmp_path / "deep").exists()


def test_what_is_there_is_never_replaced(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows").write_text("mine")
    code, _, err = ran(capsys, "export", folder, "--format", "verl-sft", "--out", tmp_path / "rows")
    assert code == 2 and "exists already" in err
    assert (tmp_path / "rows").read_text() == "mine"


def test_sft_trains_on_conversations_from_a_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word * 3}]}
        for word in ("a", "b", "c")
    ]
    data = tmp_path / "teacher.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("train", "sft", "--model", tiny, "--data", data, "--out", tmp_path / "out", "-s", "sft.steps=2")
    code, said, err = ran(capsys, *words)
    assert code == 0, err
    assert "Best validation loss" in said
    assert (tmp_path / "out" / "step-000002").is_dir()


def test_sft_without_anything_to_train_on_says_what_to_give(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = ran(capsys, "train", "sft", "--model", tiny, "--out", tmp_path / "out")
    assert code == 2 and "RUNS" in err and "--data" in err
    data = tmp_path / "one.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n')
    code, _, err = ran(capsys, "train", "sft", "--model", tiny, "--data", data, "--out", tmp_path / "out")
    assert code == 2 and "1 solved tasks and conversations with trained tokens; SFT needs at least two" in err


def test_conversations_that_train_nothing_are_left_out_and_what_is_not_read_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the seed: the split would else put one of them alone on the validation side."""
    good = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "thinking": "deep"}]
    idle = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]
    data = tmp_path / "some.jsonl"
    data.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (good, idle, good, idle, idle)))
    for seed in range(3):
        words = ("train", "sft", "--model", tiny, "--data", data, "--out", tmp_path / f"{seed}", "-s", "sft.steps=1")
        code, _, err = ran(capsys, *words, "-s", f"seed={seed}")
        assert code == 0
        assert "3 solved tasks and conversations are left out: nothing in them trains" in err
        assert "in 2 of 5 conversations: messages[].thinking is not read" in err


def test_one_file_by_two_names_does_not_train_twice(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n' * 2)
    other = tmp_path / ".." / tmp_path.name / "one.jsonl"
    words = ("train", "sft", "--model", tiny, "--data", data, "--data", other, "--out", tmp_path / "out")
    code, _, err = ran(capsys, *words)
    assert code == 2 and "names already: it would train twice" in err
