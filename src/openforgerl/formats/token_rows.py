"""Token rows: a sample with its reward, every field of it, one JSON object a line. Nothing is lost."""

from __future__ import annotations

from pathlib import Path

import msgspec

from openforgerl.formats.files import LineFile, json_lines
from openforgerl.formats.records import AttemptRecord, Decode, Report, Tally
from openforgerl.types import PlacedImage, Sample, Source, Span


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample and what its rollout got. Everything outside `spans` is context; a dense mask is
    `mask[span.start:span.stop] = 1` for every span whose state is `trained`."""

    sample_id: str
    attempt_id: str
    rollout_id: str
    group_id: str
    task: str
    harness: str
    purpose: str
    step: int
    reward: float
    passed: bool
    source: Source
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    logprobs: tuple[float, ...] | None
    """One per span token, in span order."""
    advantage: float | None
    weight: float
    images: tuple[PlacedImage, ...]
    """By sha256; their bytes are not in the row."""
    template_digest: str

    def sample(self) -> Sample:
        """The sample as it was recorded."""
        return Sample(**{name: getattr(self, name) for name in Sample.__struct_fields__})


def token_row(sample: Sample, record: AttemptRecord) -> TokenRow:
    """The row of `sample`, one of the record's."""
    own = {name: getattr(sample, name) for name in Sample.__struct_fields__}
    return TokenRow(
        **own,
        task=record.rollout.task,
        harness=record.rollout.harness,
        purpose=record.rollout.purpose,
        step=record.rollout.step,
        reward=record.verdict.reward,
        passed=record.verdict.passed,
    )


class TokenRowsJsonl:
    """Writes `token-rows-jsonl`."""

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._file = LineFile(out)
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One line per sample."""
        for sample in record.samples.samples:
            self._file.write(msgspec.json.encode(token_row(sample, record)))
            self._tally.row(sample)
            self._tally.lost("image bytes (kept by sha256)", len(sample.images))

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


def read_token_rows(path: Path) -> list[TokenRow]:
    """The rows of a `token-rows-jsonl` file. InputError naming the line that is no such row."""
    rows: list[TokenRow] = []
    json_lines(path, lambda line: rows.append(msgspec.json.decode(line, type=TokenRow)))
    return rows
