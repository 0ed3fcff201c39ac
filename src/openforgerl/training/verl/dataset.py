"""The tasks of a run as veRL's training data: a row names a task, and the orchestrator knows the rest.

veRL keeps the order and its checkpoints (`data.shuffle`, `data.seed`, `data.pt`), so a resumed run goes on with the
next task. Contract: veRL 0.9 `trainer/ppo/utils.py` `create_rl_dataset` and `utils/dataset/rl_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from openforgerl.config import choose_tasks
from openforgerl.training.verl.runs import read_config


class TaskPrompts(Dataset[dict[str, Any]]):
    """One row per task that the run's config selects. `data_files`: the run's `config.json`."""

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Only `data_files` and `max_samples` (first so many; below 0 all) are looked at."""
        file = data_files if isinstance(data_files, str) else data_files[0]
        tasks = choose_tasks(read_config(Path(file).parent))
        self._tasks = tasks if max_samples < 0 else tasks[:max_samples]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self._tasks[index]
        return {
            "task": task.name,
            "index": index,
            "raw_prompt": [{"role": "user", "content": task.instruction}],
            "data_source": "openforgerl",
        }
