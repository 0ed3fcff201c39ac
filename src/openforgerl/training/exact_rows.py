"""The rows of an `openforgerl export --format verl-sft` file as a dataset, id by id: no chat template, no tokenizer.

For veRL's `sft_trainer`, whose own dataset renders messages again: `data.custom_cls.path` is this file and
`data.custom_cls.name=ExactRows`. It imports nothing of veRL, so any loop over a torch dataset can use it. Contract:
`verl/utils/dataset/multiturn_sft_dataset.py` of veRL 0.9: what it is constructed with and what an item holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import Dataset

_COLUMNS = ("input_ids", "loss_mask")


class ExactRows(Dataset[dict[str, Tensor]]):
    """One item per row: `input_ids`, `position_ids` and `loss_mask`, int64 and of the row's length (1 = trained).

    With `pad_mode` "right" (veRL's default for its own class) items are padded to `max_length` and have an
    `attention_mask`. A row longer than `max_length` is an error: a cut row would train another end than was sampled.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any] | None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """`tokenizer` says how to pad and nothing else. Raises ValueError for a row that is too long."""
        settings = config or {}
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        tables = [pq.read_table(file, columns=list(_COLUMNS)) for file in files]
        self._rows = [row for table in tables for row in table.to_pylist()]
        if max_samples > 0:
            self._rows = self._rows[:max_samples]
        self._padded = settings.get("pad_mode", "right") == "right"
        self._length = int(settings.get("max_length", 1024))
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad_id = 0 if pad is None else int(pad)
        longest = max((len(row["input_ids"]) for row in self._rows), default=0)
        if longest > self._length:
            raise ValueError(f"the longest row has {longest} ids, max_length is {self._length}: raise data.max_length")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        item = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}
        if not self._padded:
            return item
        left = self._length - len(ids)
        item["attention_mask"] = torch.ones_like(ids)
        fill = {"input_ids": self._pad_id}
        return {
            name: torch.nn.functional.pad(value, (0, left), value=fill.get(name, 0)) for name, value in item.items()
        }
