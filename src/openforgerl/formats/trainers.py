"""Rows for trainers that take prompt and response ids: TRL, slime, OpenRLHF.

Field names: TRL 1.16 `SFTTrainer` (`input_ids`, `completion_mask`); slime `slime/utils/types.py: Sample.to_dict`, as
`slime/observability/rollout_data_utils.py` loads it; OpenRLHF `openrlhf/utils/agent.py`, what an agent executor
returns and `SamplesGenerator._process_response_into_experience` takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from openforgerl.formats.files import LineFile, PartialOutput, json_lines
from openforgerl.formats.records import (
    AttemptRecord,
    Decode,
    Report,
    Tally,
    row_logprobs,
    span_logprobs,
    trained_mask,
)
from openforgerl.formats.torch_archive import save_plain
from openforgerl.types import FinishReason, Sample, Verdict

OWN = "openforgerl"
"""The key under which slime's metadata and OpenRLHF's rows carry the rest of a sample; both ignore it."""
_APART = ("ids", "logprobs")


class TrlRows:
    """Writes `trl`: JSON lines for `SFTTrainer` with `completion_only_loss=True`; exact ids, no template applied again.

    Other columns would be collated with the rows, so there are none: rewards, log-probs and ids are lost, counted.
    """

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._file = LineFile(out)
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One line per sample that can train."""
        for sample in record.samples.samples:
            if not sample.trained_tokens:
                self._tally.lost("rows without a trained token")
                continue
            if sample.images:
                self._tally.lost("rows with images")
                continue
            line = {"input_ids": sample.ids, "completion_mask": trained_mask(sample)}
            self._file.write(msgspec.json.encode(line))
            self._tally.row(sample)
            self._tally.lost("log-probs", len(sample.logprobs or ()))
            self._tally.lost("rewards (one per row)")
            self._tally.lost("spans' calls and weights versions", len(sample.spans))

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


class SlimeForms:
    """Samples as slime's dictionaries (`Sample.from_dict`), numbered in order of arrival.

    Rows of one rollout share its `rollout_id`, so that slime counts the rollout once. A row without a trained token
    stays, with `remove_sample`: its reward belongs to the group.
    """

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode
        self._count = 0
        self._groups: dict[str, int] = {}
        self._rollouts: dict[str, int] = {}

    def form(self, sample: Sample, *, task: str, reward: float, truncated: bool) -> dict[str, Any]:
        """One sample that has spans and no images."""
        start, index = _response_start(sample), self._count
        logprobs = row_logprobs(sample)
        self._count += 1
        return {
            "group_index": self._groups.setdefault(sample.group_id, len(self._groups)),
            "index": index,
            "rollout_id": self._rollouts.setdefault(sample.rollout_id, len(self._rollouts)),
            "prompt": self._decode(sample.ids[:start]) if self._decode else "",
            "tokens": list(sample.ids),
            "response": self._decode(sample.ids[start:]) if self._decode else "",
            "response_length": len(sample.ids) - start,
            "label": None,
            "reward": reward,
            "loss_mask": trained_mask(sample)[start:],
            "weight_versions": [str(span.weights_version) for span in sample.spans],
            "rollout_log_probs": None if logprobs is None else logprobs[start:],
            "remove_sample": not sample.trained_tokens,
            "status": "truncated" if truncated else "completed",
            "metadata": {OWN: {"task": task, **_rest(sample)}},
        }


class SlimeSamples:
    """Writes `slime`: the file that `--load-debug-rollout-data` and `forge_load` read, `SlimeForms` inside.

    All samples are held until `close`: slime's file is one pickle.
    """

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._partial = PartialOutput(out)
        self._decode = decode
        self._tally = Tally()
        self._samples: list[dict[str, Any]] = []
        self._forms = SlimeForms(decode)

    def add(self, record: AttemptRecord) -> None:
        """One dictionary per sample."""
        for sample in record.samples.samples:
            if sample.images:
                self._tally.lost("rows with images")
                continue
            if not sample.spans:
                self._tally.lost("rows without a sampled token")
                continue
            form = self._forms.form(
                sample,
                task=record.rollout.task,
                reward=record.verdict.reward,
                truncated=_cut_by_length(sample, record),
            )
            self._samples.append(form)
            self._tally.row(sample)
            if self._decode is None:
                self._tally.lost("texts of prompt and response (no tokenizer given)", 2)

    def close(self) -> Report:
        """Write the file."""
        save_plain({"rollout_id": 0, "samples": self._samples}, self._partial.path)
        self._partial.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._partial.remove()


def openrlhf_form(sample: Sample, *, prompt: str, label: str, verdict: Verdict, truncated: bool) -> dict[str, Any]:
    """A sample as what an agent executor of OpenRLHF's returns: one episode."""
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": list(sample.ids),
        "action_ranges": [(span.start, span.stop) for span in sample.spans if span.state == "trained"],
        "rollout_log_probs": row_logprobs(sample),
        "reward": verdict.reward,
        "scores": float(verdict.passed),
        "truncated": truncated,
        "extra_logs": {},
    }


class OpenRlhfSamples:
    """Writes `openrlhf`: one agent executor's result a line. OpenRLHF has no loader of its own: docs/exports.md."""

    def __init__(self, out: Path, decode: Decode | None = None) -> None:
        self._file = LineFile(out)
        self._decode = decode
        self._tally = Tally()

    def add(self, record: AttemptRecord) -> None:
        """One line per sample."""
        for sample in record.samples.samples:
            if sample.images:
                self._tally.lost("rows with images")
                continue
            if not sample.trained_tokens:
                self._tally.lost("rows without a trained token")
                continue
            form = openrlhf_form(
                sample,
                prompt=self._decode(sample.ids[: _response_start(sample)]) if self._decode else "",
                label=record.rollout.task,
                verdict=record.verdict,
                truncated=_cut_by_length(sample, record),
            )
            self._file.write(msgspec.json.encode(form | {OWN: _rest(sample)}))
            self._tally.row(sample)
            if self._decode is None:
                self._tally.lost("texts of prompts (no tokenizer given)")

    def close(self) -> Report:
        """Finish the file."""
        self._file.finish()
        return self._tally.report()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.remove()


def slime_sample(form: dict[str, Any]) -> Sample:
    """The sample in one of slime's dictionaries that `SlimeSamples` made. ValueError when it is not one of ours."""
    own = form["metadata"].get(OWN)
    if own is None:
        raise ValueError(f"metadata has no {OWN!r}: this dictionary was not exported here")
    rest = {name: value for name, value in own.items() if name != "task"}
    values: list[float] | None = form["rollout_log_probs"]
    if values is not None:
        values = [0.0] * (len(form["tokens"]) - len(values)) + values
    return _rebuilt(rest, form["tokens"], values)


def read_openrlhf(path: Path) -> list[Sample]:
    """The samples of an `openrlhf` file. InputError naming the line that was not exported here."""
    found: list[Sample] = []

    def take(line: bytes) -> None:
        row = msgspec.json.decode(line)
        if not isinstance(row, dict) or OWN not in row:
            raise ValueError(f"the line has no {OWN!r}: it was not exported here")
        found.append(_rebuilt(row[OWN], row["observation_tokens"], row["rollout_log_probs"]))

    json_lines(path, take)
    return found


def _rest(sample: Sample) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(sample, name)) for name in Sample.__struct_fields__ if name not in _APART}


def _rebuilt(rest: dict[str, Any], ids: list[int], values: list[float] | None) -> Sample:
    ranges = [(span["start"], span["stop"]) for span in rest["spans"]]
    logprobs = None if values is None else span_logprobs(len(ids), ranges, values)
    return msgspec.convert({**rest, "ids": ids, "logprobs": logprobs}, Sample)


def _response_start(sample: Sample) -> int:
    """Where the response begins for trainers that know one prompt and one response: at the first span."""
    return sample.spans[0].start if sample.spans else len(sample.ids)


def _cut_by_length(sample: Sample, record: AttemptRecord) -> bool:
    if not sample.spans:
        return False
    last = next((call for call in record.calls if call.call_id == sample.spans[-1].call_id), None)
    return last is not None and last.finish_reason is FinishReason.LENGTH
