"""`openforgerl audit`: silent on a sound run, exit code 1 with the reason on a damaged one."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from openforgerl.cli.main import main
from openforgerl.store.packing import digest_blobs, pack_floats, unpack_floats
from openforgerl.testing.tiny_model import write_tiny_model

from .recorded_run import make_run


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


def test_a_sound_run_is_scored_with_its_weights_and_has_no_finding(
    folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, err = ran(capsys, "audit", folder, "--model", tiny)
    assert code == 0, said + err
    assert "4 attempts audited; left out 1 failed, 1 failed and tried again" in said
    assert "scored again, weights version 0" in said
    assert said.endswith("no finding\n")


def test_without_weights_it_says_so_and_the_rest_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = ran(capsys, "audit", folder)
    assert code == 0 and "give --model DIR" in said


def test_json_holds_every_call(folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = ran(capsys, "audit", folder, "--purpose", "train", "--model", tiny, "--json")
    found = json.loads(said)
    assert code == 0 and len(found["attempts"]) == 3
    sampled = 0
    for attempt in found["attempts"]:
        assert len(attempt["calls"]) == 2
        sampled += attempt["totals"]["sampled"]
        assert sum(call["sampled"] for call in attempt["calls"]) == attempt["totals"]["sampled"]
    scored = found["rescored"]["versions"][0]
    assert scored["tokens"] == sampled - sum(sum(a["totals"]["dropped"].values()) for a in found["attempts"])
    assert scored["max"] < 1e-4


def test_other_weights_are_a_finding(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    code, said, _ = ran(capsys, "audit", folder, "--model", other)
    assert code == 1
    assert "FINDING log-probs of weights version 0 differ by" in said
    code, _, _ = ran(capsys, "audit", folder, "--model", other, "--max-mean", 100, "--max-difference", 100)
    assert code == 0


def test_a_sample_that_was_tampered_with_is_a_finding(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One log-prob is changed and the row's digest made good again: only comparing with the call can tell."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    with sqlite3.connect(copy / "run.sqlite") as connection:
        sample_id, ids, logprobs, detail = connection.execute(
            "SELECT sample_id, ids, logprobs, detail FROM samples WHERE attempt_id = 'r0-a0'"
        ).fetchone()
        values = list(unpack_floats(logprobs) or ())
        packed = pack_floats([*values[:-1], values[-1] / 2])
        connection.execute(
            "UPDATE samples SET logprobs = ?, row_sha256 = ? WHERE sample_id = ?",
            (packed, digest_blobs(ids, packed, detail), sample_id),
        )
    connection.close()
    code, said, _ = ran(capsys, "audit", copy)
    assert code == 1
    assert f"FINDING r0-a0: sample {sample_id}: log-probs of" in said
    assert "1 findings" in said


def test_an_account_that_does_not_add_up_is_a_finding(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    with sqlite3.connect(copy / "run.sqlite") as connection:
        (totals,) = connection.execute("SELECT totals FROM attempts WHERE attempt_id = 'r0-a0'").fetchone()
        changed = msgspec.json.decode(totals)
        changed["trained"] -= 1
        changed["masked"] = {"stale": 1}
        connection.execute("UPDATE attempts SET totals = ? WHERE attempt_id = 'r0-a0'", (msgspec.json.encode(changed),))
    connection.close()
    code, said, _ = ran(capsys, "audit", copy)
    assert code == 1 and "is not what the samples say" in said


def damaged(folder: Path, place: Path, *statements: str) -> Path:
    copy = shutil.copytree(folder, place / "copy")
    with sqlite3.connect(copy / "run.sqlite") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return copy


def test_a_call_that_is_gone_is_a_finding_also_where_weights_are_named(
    folder: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damaged(folder, tmp_path, "DELETE FROM calls WHERE session_id = 'r0-a0'")
    for words in ((), ("--model", tiny)):
        code, said, _ = ran(capsys, "audit", copy, *words)
        assert code == 1 and "FINDING r0-a0: " in said
    for form in ("atif", "openai-jsonl"):
        code, _, err = ran(capsys, "export", copy, "--format", form, "--out", tmp_path / form)
        assert code == 1 and "which the run does not hold: it is damaged" in err


def test_nothing_to_audit_is_a_finding(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = damaged(folder, tmp_path, "DELETE FROM samples", "UPDATE attempts SET totals = NULL")
    code, said, _ = ran(capsys, "audit", copy)
    assert code == 1
    assert "FINDING no attempt was audited" in said and "it is graded, " in said and "it has no samples" in said


def test_weights_by_which_nothing_is_scored_are_a_finding(
    folder: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damaged(folder, tmp_path, "DELETE FROM calls")
    code, said, _ = ran(capsys, "audit", copy, "--model", tiny)
    assert code == 1 and "FINDING nothing was scored again with --model" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": [1]}'])
def test_a_tokenizer_that_cannot_be_read_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    copy = damaged(folder, tmp_path)
    (copy / "tokenizer").mkdir(exist_ok=True)
    (copy / "tokenizer" / "tokenizer.json").write_text(content)
    code, _, err = ran(capsys, "audit", copy)
    assert code == 2 and "the run's tokenizer cannot be read" in err


def test_an_unknown_purpose_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, "audit", folder, "--purpose", "rl")
    assert code == 2 and "no rollouts of purpose 'rl'" in err


def test_special_tokens_that_requests_spell_are_reported_and_no_finding(
    folder: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    assert "special token text" not in ran(capsys, "audit", run)[1]
    (call, *_), *_ = [attempt["calls"] for attempt in json.loads(ran(capsys, "audit", run, "--json")[1])["attempts"]]
    (run / "tokenizer").mkdir(exist_ok=True)
    tokens = [{"id": 0, "content": word, "special": True} for word in ("e", "<|im_end|>")]  # "e": in any request
    (run / "tokenizer" / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    code, said, _ = ran(capsys, "audit", run)
    assert code == 0 and "messages, rendered as text; for example" in said
    assert f" {call['call_id']} at messages[0] (" in said and "): 'e'" in said and "no finding" in said
