"""Served weights against trained weights, at every step of veRL's trainer.

What was sampled since the last weight update carries the log-probs of the served weights, and veRL scores the same
tokens with the trained ones before it updates them: a probe made of the rollouts themselves. Two things can be wrong.
Rows say which version sampled them: in `sync` mode that must be the one just trained. And the log-probs must agree as
far as number formats let them; a tensor that went to a wrong place shows there.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.v1 import trainer_base

from openforgerl.training.served import check_difference, check_version


def use_checked_trainer(mode: str) -> None:
    """Make veRL's trainer of `mode` check from now on, in this process."""
    known = trainer_base.get_trainer_cls(mode)
    if not issubclass(known, _Checked):
        trainer_base.TRAINER_REGISTRY[mode] = type(f"Checked{known.__name__}", (_Checked, known), {})


class _Checked(trainer_base.PPOTrainer):
    """Mixed into a trainer of veRL's."""

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """veRL's scoring, then the comparison. Raises TrainingError when served and trained weights differ."""
        batch = super()._compute_old_log_prob(batch, metrics)
        trained = self.global_steps - 1
        rows = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        if self.trainer_mode == "sync":
            for key, tag in rows:
                check_version(f"row {key}", tag["min_global_steps"], tag["max_global_steps"], trained)
        fresh = [key for key, tag in rows if tag["min_global_steps"] == tag["max_global_steps"] == trained]
        if not fresh:
            return batch
        data = tq.kv_batch_get(
            keys=fresh,
            partition_id=batch.partition_id,
            select_fields=["rollout_log_probs", "old_log_probs", "response_mask"],
        ).to_padded_tensor()
        mask = data["response_mask"].bool()
        difference = (data["rollout_log_probs"].float() - data["old_log_probs"].float()).abs()[mask]
        if difference.numel():
            mean, largest = float(difference.mean()), float(torch.max(difference))
            metrics["training/served_logprob_difference/mean"] = mean
            metrics["training/served_logprob_difference/max"] = largest
            limit = self.config.openforgerl.get("served_difference", None)
            check_difference(mean, largest, trained, limit=0.05 if limit is None else limit)
        return batch
