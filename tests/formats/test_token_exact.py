"""What is written with exact ids is read back as the very samples that were recorded; the rest is counted as lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import torch

from openforgerl.errors import ConfigError, InputError
from openforgerl.formats import AttemptRecord, Decode, Report, open_writer
from openforgerl.formats.parquet import read_token_rows_parquet
from openforgerl.formats.token_rows import read_token_rows
from openforgerl.formats.trainers import read_openrlhf, slime_sample
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.training.exact_rows import ExactRows
from openforgerl.types import Sample


def write(name: str, out: Path, records: list[AttemptRecord], decode: Decode | None = None) -> Report:
    with open_writer(name, out, decode) as writer:
        for record in records:
            writer.add(record)
        return writer.close()


def all_samples(records: list[AttemptRecord]) -> list[Sample]:
    return [sample for record in records for sample in record.samples.samples]


def trainable(records: list[AttemptRecord]) -> list[Sample]:
    return [sample for sample in all_samples(records) if sample.trained_tokens]


def test_the_records_hold_what_these_tests_are_about(records: list[AttemptRecord]) -> None:
    assert [len(record.samples.samples) for record in records] == [1, 4, 3, 1]
    assert len(all_samples(records)) - len(trainable(records)) == 2  # the title and the probe
    assert set(records[3].samples.totals.dropped) == {"retry"}


@pytest.mark.parametrize(
    ("name", "read"),
    [("token-rows-jsonl", read_token_rows), ("token-rows-parquet", read_token_rows_parquet)],
)
def test_token_rows_lose_nothing(name: str, read: Any, records: list[AttemptRecord], tmp_path: Path) -> None:
    report = write(name, tmp_path / "rows", records)
    rows = read(tmp_path / "rows")
    assert [row.sample() for row in rows] == all_samples(records)
    assert report.lost == {}
    assert (report.attempts, report.rows) == (4, 9)
    assert report.tokens == sum(len(sample.ids) for sample in all_samples(records))
    assert report.trained_tokens == sum(record.samples.totals.trained for record in records)
    by_attempt = {
        row.attempt_id: (row.reward, row.passed, row.task, row.harness, row.purpose, row.step) for row in rows
    }
    assert by_attempt["r2-a0"] == (0.25, False, "task-1", "pi", "train", 3)


def test_log_probs_survive_to_the_last_bit(records: list[AttemptRecord], tmp_path: Path) -> None:
    """-1/3 has no short decimal form, and 5e-324 is the smallest double there is."""
    sample = records[0].samples.samples[0]
    odd = tuple(-1 / 3 if at % 2 else -5e-324 for at in range(sample.span_tokens))
    totals = records[0].samples.totals
    changed = msgspec.structs.replace(sample, logprobs=odd, advantage=-1 / 7, weight=0.1)
    record = msgspec.structs.replace(
        records[0], samples=msgspec.structs.replace(records[0].samples, samples=(changed,), totals=totals)
    )
    for name, read in (("token-rows-jsonl", read_token_rows), ("token-rows-parquet", read_token_rows_parquet)):
        write(name, tmp_path / name, [record])
        assert read(tmp_path / name)[0].sample() == changed


def test_verl_rows_are_exact_and_the_dataset_hands_out_just_them(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "sft.parquet"
    report = write("verl-sft", out, records)
    assert report.lost == {"rows without a trained token": 2}
    wanted = trainable(records)
    assert [row.sample() for row in read_token_rows_parquet(out)] == wanted
    longest = max(len(sample.ids) for sample in wanted)
    bare = ExactRows(str(out), None, {"pad_mode": "no_padding", "max_length": longest})
    assert len(bare) == len(wanted)
    for number, sample in enumerate(wanted):
        item = bare[number]
        assert item["input_ids"].tolist() == list(sample.ids)
        assert item["position_ids"].tolist() == list(range(len(sample.ids)))
        places = [at for span in sample.spans for at in range(span.start, span.stop) if span.state == "trained"]
        assert item["loss_mask"].nonzero()[:, 0].tolist() == places

    class Tokenizer:
        pad_token_id = 7

    padded = ExactRows([str(out)], Tokenizer(), {"max_length": longest + 3}, max_samples=2)
    assert len(padded) == 2
    length = len(wanted[0].ids)
    item = padded[0]
    assert item.keys() == {"input_ids", "attention_mask", "position_ids", "loss_mask"}
    assert {tuple(value.shape) for value in item.values()} == {(longest + 3,)}
    assert item["input_ids"][length:].unique().tolist() == [7]
    assert int(item["attention_mask"].sum()) == length
    assert int(item["loss_mask"].sum()) == wanted[0].trained_tokens
    with pytest.raises(ValueError, match=rf"longest row has {longest} ids, max_length is 8"):
        ExactRows(str(out), None, {"max_length": 8})


def test_a_mask_that_contradicts_the_spans_is_refused(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "sft.parquet"
    write("verl-sft", out, records[:1])
    table = pq.read_table(out)
    row = table.to_pylist()[0]
    row["loss_mask"][row["spans"][0]["start"]] = 0
    changed = type(table).from_pylist([row], schema=table.schema)
    pq.write_table(changed, tmp_path / "changed.parquet")
    with pytest.raises(InputError, match="row 0: loss_mask of sample r0-a0/c3 is not what its spans say"):
        read_token_rows_parquet(tmp_path / "changed.parquet")


def test_trl_rows_hold_ids_and_mask_and_count_the_rest(records: list[AttemptRecord], tmp_path: Path) -> None:
    report = write("trl", tmp_path / "trl.jsonl", records)
    lines = [json.loads(line) for line in (tmp_path / "trl.jsonl").read_text().splitlines()]
    wanted = trainable(records)
    assert [tuple(line["input_ids"]) for line in lines] == [sample.ids for sample in wanted]
    for line, sample in zip(lines, wanted, strict=True):
        assert line.keys() == {"input_ids", "completion_mask"}
        assert sum(line["completion_mask"]) == sample.trained_tokens
        first = sample.spans[0]
        assert line["completion_mask"][first.start - 1 : first.start + 1] == [0, 1]
    assert report.lost == {
        "log-probs": sum(sample.span_tokens for sample in wanted),
        "rewards (one per row)": len(wanted),
        "rows without a trained token": 2,
        "spans' calls and weights versions": sum(len(sample.spans) for sample in wanted),
    }


def test_slime_reads_our_file_and_finds_every_field_in_place(
    records: list[AttemptRecord], renderer: ChatRenderer, tmp_path: Path
) -> None:
    report = write("slime", tmp_path / "0.pt", records, renderer.decode)
    assert report.lost == {}
    data = torch.load(tmp_path / "0.pt", weights_only=True)  # the safe loader: nothing but plain values inside
    assert data["rollout_id"] == 0
    forms = data["samples"]
    assert [slime_sample(form) for form in forms] == all_samples(records)
    assert [form["group_index"] for form in forms] == [0] * 5 + [1] * 4
    assert [form["rollout_id"] for form in forms] == [0, 1, 1, 1, 1, 2, 2, 2, 3]
    assert [form["index"] for form in forms] == list(range(9))
    assert {form["rollout_id"]: form["reward"] for form in forms} == {0: 1.0, 1: 0.0, 2: 0.25, 3: 1.0}
    assert [form["remove_sample"] for form in forms] == [not sample.trained_tokens for sample in all_samples(records)]
    for form, sample in zip(forms, all_samples(records), strict=True):
        length = form["response_length"]
        assert len(form["loss_mask"]) == len(form["rollout_log_probs"]) == length
        assert form["tokens"][-length:] == list(sample.ids[sample.spans[0].start :])
        assert renderer.encode(form["prompt"])[:3] == sample.ids[:3]
        assert sum(form["loss_mask"]) == sample.trained_tokens
        assert len(form["weight_versions"]) == len(sample.spans)
    probe = next(form for form in forms if form["status"] == "truncated")
    assert probe["response"] == "Hi"  # the probe's answer ended at max_tokens 1; no other was cut


def test_openrlhf_rows_are_what_its_generator_takes(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    report = write("openrlhf", out, records)
    wanted = trainable(records)
    assert report.lost == {"rows without a trained token": 2, "texts of prompts (no tokenizer given)": len(wanted)}
    assert read_openrlhf(out) == wanted
    for line, sample in zip(out.read_text().splitlines(), wanted, strict=True):
        row = json.loads(line)
        # `_process_response_into_experience` indexes log-probs by token and marks [start, stop) as actions.
        assert len(row["rollout_log_probs"]) == len(row["observation_tokens"])
        assert sum(stop - start for start, stop in row["action_ranges"]) == sample.trained_tokens
        start = row["action_ranges"][0][0]
        assert row["rollout_log_probs"][start] == (sample.logprobs or ())[0]


def test_an_export_replaces_nothing_and_leaves_nothing_half_done(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"), open_writer("trl", out):
        pass
    assert out.read_text() == "mine"
    for name in ("trl", "token-rows-parquet", "slime", "atif"):
        with pytest.raises(RuntimeError), open_writer(name, tmp_path / name) as writer:
            writer.add(records[0])
            raise RuntimeError
    assert list(tmp_path.iterdir()) == [out]


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "openforgerl.formats.parquet")
    with (
        pytest.raises(ConfigError, match=r"needs pyarrow.*pip install 'openforgerl\[export\]'"),
        open_writer("verl-sft", tmp_path / "x"),
    ):
        pass


def test_foreign_lines_are_refused_by_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\n{"ids": [1]}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:2: Object missing required field"):
        read_token_rows(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="is no Parquet file"):
        read_token_rows_parquet(tmp_path / "rows.jsonl")
