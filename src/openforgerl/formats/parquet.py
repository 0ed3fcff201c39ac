"""Parquet, through pyarrow (extra `export`): token rows, and veRL's SFT files. This file and
`training/exact_rows.py` are the doors to pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from openforgerl.errors import InputError
from openforgerl.formats.files import PartialOutput
from openforgerl.formats.records import AttemptRecord, Decode, Report, Tally, trained_mask
from openforgerl.formats.token_rows import TokenRow, token_row
from openforgerl.types import Sample

_BATCH_TOKENS = 1 << 20
"""Ids in a row group: what a writer holds in memory."""

_SPAN = pa.struct(
    [
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("call_id", pa.string()),
        ("offset", pa.int64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("weights_version", pa.int64()),
    ]
)
_IMAGE = pa.struct(
    [("sha256", pa.string()), ("start", pa.int64()), ("count", pa.int64()), ("grid", pa.list_(pa.int64()))]
)
_COLUMNS: dict[str, Any] = {
    "sample_id": pa.string(),
    "attempt_id": pa.string(),
    "rollout_id": pa.string(),
    "group_id": pa.string(),
    "task": pa.string(),
    "harness": pa.string(),
    "purpose": pa.string(),
    "step": pa.int64(),
    "reward": pa.float64(),
    "passed": pa.bool_(),
    "source": pa.string(),
    "ids": pa.list_(pa.int64()),
    "spans": pa.list_(_SPAN),
    "logprobs": pa.list_(pa.float64()),
    "advantage": pa.float64(),
    "weight": pa.float64(),
    "images": pa.list_(_IMAGE),
    "template_digest": pa.string(),
}


class _RowGroups:
    """A Parquet file that grows by row groups of bounded size."""

    def __init__(self, out: Path, columns: dict[str, Any]) -> None:
        self._partial = PartialOutput(out)
        self._schema = pa.schema(list(columns.items()))
        self._writer = pq.ParquetWriter(self._partial.path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self._tokens += tokens
        if self._tokens >= _BATCH_TOKENS:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        self._partial.finish()

    def remove(self) -> None:
        self._writer.close()
        self._partial.remove()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._tokens = [], 0


class TokenRowsParquet:
    """Writes `token-rows-parquet`: the columns of `TokenRow`, nothing lost."""

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._file = _RowGroups(out, _COLUMNS)
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One row per sample."""
        for sample in record.samples.samples:
            self._file.add(msgspec.to_builtins(token_row(sample, record)), len(sample.ids))
            self._tally.row(sample)
            self._tally.lost("image bytes (kept by sha256)", len(sample.images))

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


class VerlSft:
    """Writes `verl-sft`: `input_ids` and `loss_mask` for `training.exact_rows`, and all other columns of a token row.

    Rows without a trained token, and rows with images, are left out: veRL's SFT could not learn from the first and
    would train the second on ids whose images it has not.
    """

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        columns = {"input_ids" if name == "ids" else name: kind for name, kind in _COLUMNS.items()}
        self._file = _RowGroups(out, columns | {"loss_mask": pa.list_(pa.int8())})
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One row per sample that can train."""
        for sample in record.samples.samples:
            if not sample.trained_tokens:
                self._tally.lost("rows without a trained token")
                continue
            if sample.images:
                self._tally.lost("rows with images")
                continue
            row = msgspec.to_builtins(token_row(sample, record))
            row["input_ids"] = row.pop("ids")
            row["loss_mask"] = trained_mask(sample)
            self._file.add(row, len(sample.ids))
            self._tally.row(sample)

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


def read_token_rows_parquet(path: Path) -> list[TokenRow]:
    """The rows of a `token-rows-parquet` or `verl-sft` file. InputError when it is neither."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error
    found: list[TokenRow] = []
    for number, row in enumerate(rows):
        mask = row.pop("loss_mask", None)
        if "input_ids" in row:
            row["ids"] = row.pop("input_ids")
        try:
            read = msgspec.convert(row, TokenRow)
            _check_mask(read.sample(), mask)
        except ValueError as error:
            raise InputError(f"{path}, row {number}: {error}") from error
        found.append(read)
    return found


def _check_mask(sample: Sample, mask: list[int] | None) -> None:
    if mask is not None and mask != trained_mask(sample):
        raise ValueError(f"loss_mask of sample {sample.sample_id} is not what its spans say")
