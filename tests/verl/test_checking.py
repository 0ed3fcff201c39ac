"""The check of served weights inside veRL's trainer: faults planted in a batch stop it, each with its own message."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base

from openforgerl.errors import TrainingError
from openforgerl.training.verl import checking

pytestmark = pytest.mark.verl


@dataclass
class Queue:
    """Rows as veRL's TransferQueue gives them back: jagged tensors of the keys asked for."""

    rows: dict[str, tuple[list[float], list[float], list[int]]]
    asked: list[str] = field(default_factory=list[str])

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.asked = keys
        columns = zip(*(self.rows[key] for key in keys), strict=True)
        jagged = [
            torch.nested.as_nested_tensor([torch.tensor(row) for row in column], layout=torch.jagged)
            for column in columns
        ]
        return TensorDict(dict(zip(select_fields, jagged, strict=True)), batch_size=[len(keys)])


class Scored(trainer_base.PPOTrainer):
    """A trainer of veRL's whose scoring is done."""

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def on_step_end(self) -> None: ...

    def on_sample_end(self) -> None: ...


def check(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, versions: dict[str, tuple[int, int]], mode: str = "sync"
) -> dict[str, float]:
    """Step 5 of a trainer whose weights are version 4, on the rows of `queue`; the metrics."""
    monkeypatch.setattr(checking, "tq", queue)
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "scored", Scored)
    checking.use_checked_trainer("scored")
    trainer = object.__new__(trainer_base.TRAINER_REGISTRY["scored"])
    trainer.global_steps, trainer.trainer_mode = 5, mode
    trainer.config = SimpleNamespace(openforgerl={"served_difference": None})
    tags = [{"min_global_steps": low, "max_global_steps": high} for low, high in versions.values()]
    tags.append({"is_padding": True, "min_global_steps": 0, "max_global_steps": 0})
    batch = SimpleNamespace(keys=[*versions, "pad_0_0"], tags=tags, partition_id="train")
    metrics: dict[str, float] = {}
    assert trainer._compute_old_log_prob(batch, metrics) is batch
    return metrics


def test_only_trained_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue({"a": ([-1.0, -2.0, 0.0], [-1.01, -2.0, -9.0], [1, 1, 0]), "b": ([-1.0], [-1.02], [1])})
    metrics = check(monkeypatch, queue, {"a": (4, 4), "b": (4, 4)})
    assert metrics["training/served_logprob_difference/mean"] == pytest.approx(0.01, abs=1e-5)
    assert metrics["training/served_logprob_difference/max"] == pytest.approx(0.02, abs=1e-5)


def test_other_weights_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue({"a": ([-1.0, -2.0], [-1.2, -1.8], [1, 1])})
    with pytest.raises(TrainingError, match=r"weights of version 4 differ: .*0\.2 nats apart"):
        check(monkeypatch, queue, {"a": (4, 4)})


@pytest.mark.parametrize("versions", [(3, 3), (3, 4)])
def test_an_update_did_not_arrive(versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="row a was sampled by weights of version 3"):
        check(monkeypatch, Queue({"a": ([-1.0], [-1.0], [1])}), {"a": versions})


def test_stale_rows_of_the_async_modes_are_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue({"stale": ([-1.0], [-3.0], [1]), "mixed": ([-1.0], [-3.0], [1]), "fresh": ([-1.0], [-1.0], [1])})
    versions = {"stale": (2, 2), "mixed": (3, 4), "fresh": (4, 4)}
    assert check(monkeypatch, queue, versions, "colocate_async")["training/served_logprob_difference/max"] == 0.0
    assert queue.asked == ["fresh"]
    del versions["fresh"]
    assert check(monkeypatch, queue, versions, "colocate_async") == {}
