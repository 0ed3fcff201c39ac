"""Samples as rows: ids and log-probs as blobs, the rest as JSON."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from openforgerl.errors import StoreError
from openforgerl.store.packing import digest_blobs, pack_floats, pack_ids, unpack_floats, unpack_ids
from openforgerl.types import Sample, SampleSet, Totals

_APART = ("ids", "logprobs")


def insert_samples(connection: sqlite3.Connection, attempt_id: str, samples: SampleSet) -> None:
    """Store an attempt's samples. StoreError when one belongs to another attempt or its id is taken."""
    for position, sample in enumerate(samples.samples):
        if sample.attempt_id != attempt_id:
            raise StoreError(f"sample {sample.sample_id} belongs to attempt {sample.attempt_id}, not {attempt_id}")
        detail: dict[str, Any] = {
            name: getattr(sample, name) for name in sample.__struct_fields__ if name not in _APART
        }
        columns = (pack_ids(sample.ids), pack_floats(sample.logprobs), msgspec.json.encode(detail))
        try:
            connection.execute(
                "INSERT INTO samples (sample_id, attempt_id, position, ids, logprobs, detail, row_sha256) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (sample.sample_id, attempt_id, position, *columns, digest_blobs(*columns)),
            )
        except sqlite3.IntegrityError as error:
            raise StoreError(f"sample {sample.sample_id} is stored already; sample ids must be unique") from error


def read_samples(connection: sqlite3.Connection, attempt_ids: Sequence[str]) -> dict[str, SampleSet]:
    """Attempt id → its samples in order; attempts without a sample set are left out."""
    found: dict[str, SampleSet] = {}
    for attempt_id in attempt_ids:
        row = connection.execute("SELECT totals FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()
        if row is None or row[0] is None:
            continue
        rows = connection.execute(
            "SELECT sample_id, row_sha256, ids, logprobs, detail FROM samples WHERE attempt_id = ? ORDER BY position",
            (attempt_id,),
        ).fetchall()
        try:
            totals = msgspec.json.decode(row[0], type=Totals)
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"damaged run database: totals of attempt {attempt_id} ({error})") from error
        found[attempt_id] = SampleSet(samples=tuple(_sample(*columns) for columns in rows), totals=totals)
    return found


def _sample(sample_id: str, digest: bytes, ids: bytes, logprobs: bytes | None, detail: bytes) -> Sample:
    try:
        if digest_blobs(ids, logprobs, detail) != digest:
            raise StoreError(f"damaged run database: sample {sample_id} does not match its digest")
        fields = msgspec.json.decode(detail)
        fields |= {"ids": unpack_ids(ids), "logprobs": unpack_floats(logprobs)}
        return msgspec.convert(fields, Sample)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise StoreError(f"damaged run database: sample {sample_id} cannot be read ({error})") from error
