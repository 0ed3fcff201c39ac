"""What a learner minimises: a loss per trained token, and what is worth knowing about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from openforgerl.training.algorithms import policy_loss
from openforgerl.training.options import Aggregation, GrpoOptions
from openforgerl.training.packing import Pack


@dataclass(frozen=True, slots=True)
class Terms:
    """One micro-batch's contribution. `_L` as in `packing`: one entry per trained token."""

    loss: Tensor
    """Scalar with gradient; the batch's loss is the sum over its micro-batches."""
    ratio_L: Tensor | None = None
    clipped_L: Tensor | None = None
    dual_clipped_L: Tensor | None = None


class Objective(Protocol):
    """Turns log-probs of trained tokens into a loss."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def needs_logprobs(self) -> bool:
        """Whether samples must carry recorded log-probs and an advantage."""
        ...

    def terms(self, logprob_L: Tensor, pack: Pack) -> Terms: ...


@dataclass(frozen=True, slots=True)
class Likelihood:
    """SFT: minus the weighted log-prob of every trained token."""

    aggregation: Aggregation = "token_mean"
    needs_logprobs: bool = False

    def terms(self, logprob_L: Tensor, pack: Pack) -> Terms:
        return Terms(loss=-(logprob_L * pack.weight_L).sum())


@dataclass(frozen=True, slots=True)
class ClippedPolicy:
    """GRPO: the clipped policy loss against the recorded log-probs (`algorithms.policy_loss`)."""

    aggregation: Aggregation = "rollout_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float = 3.0
    needs_logprobs: bool = True

    @classmethod
    def of(cls, options: GrpoOptions) -> ClippedPolicy:
        return cls(options.aggregation, options.clip_low, options.clip_high, options.clip_dual)

    def terms(self, logprob_L: Tensor, pack: Pack) -> Terms:
        result = policy_loss(
            logprob_L,
            pack.old_logprob_L,
            pack.advantage_L,
            torch.ones_like(logprob_L, dtype=torch.bool),
            weight=pack.weight_L,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_dual=self.clip_dual,
        )
        return Terms(result.loss, result.ratio, result.clipped, result.dual_clipped)


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer update. Statistics are over trained tokens; None where the objective has no such thing."""

    update: int
    """1-based count of optimizer updates, this one included; unchanged when `updated` is False."""
    updated: bool
    """False when no token was to be trained: weights and optimizer stayed as they were."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """2-norm over all parameters before clipping."""
    learning_rate: float = 0.0
    entropy: float = 0.0
    """Mean entropy of the policy's next-token distribution, nats."""
    accuracy: float = 0.0
    """Share of trained tokens that are the model's most likely one."""
    ratio_mean: float | None = None
    ratio_max: float | None = None
    clip_fraction: float | None = None
    dual_clip_fraction: float | None = None
    logprob_difference_mean: float | None = None
    """Mean |trainer's log-prob - recorded log-prob|: about 1e-6 when engine and trainer agree and the update is
    the first with these weights."""
    logprob_difference_max: float | None = None
    samples: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    """Span tokens that no loss sees."""
    tokens_in_rows: int = 0
    """Ids of all rows with a trained token: what a row-by-row pass would compute."""
    tokens_computed: int = 0
    """Ids that went through the model, shared prefixes once."""
    micro_batches: int = 0


@dataclass(slots=True)
class TokenSums:
    """Running sums over trained tokens of a batch's micro-batches."""

    count: int = 0
    entropy: float = 0.0
    correct: int = 0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    dual_clipped: int = 0
    difference: float = 0.0
    difference_max: float = 0.0
    policy: bool = field(default=False)
    """Whether ratio statistics mean anything."""

    def add(self, pack: Pack, terms: Terms, logprob_L: Tensor, entropy_L: Tensor, correct_L: Tensor) -> None:
        """Count one micro-batch."""
        self.count += int(logprob_L.numel())
        self.entropy += float(entropy_L.double().sum())
        self.correct += int(correct_L.sum())
        if terms.ratio_L is None or terms.clipped_L is None or terms.dual_clipped_L is None:
            return
        self.policy = True
        difference = (logprob_L.detach() - pack.old_logprob_L).abs()
        self.ratio += float(terms.ratio_L.double().sum())
        self.ratio_max = max(self.ratio_max, float(terms.ratio_L.max()))
        self.clipped += int(terms.clipped_L.sum())
        self.dual_clipped += int(terms.dual_clipped_L.sum())
        self.difference += float(difference.double().sum())
        self.difference_max = max(self.difference_max, float(difference.max()))

    def statistics(self) -> dict[str, float]:
        """The fields of `StepMetrics` that these sums decide."""
        if not self.count:
            return {}
        found = {"entropy": self.entropy / self.count, "accuracy": self.correct / self.count}
        if self.policy:
            found |= {
                "ratio_mean": self.ratio / self.count,
                "ratio_max": self.ratio_max,
                "clip_fraction": self.clipped / self.count,
                "dual_clip_fraction": self.dual_clipped / self.count,
                "logprob_difference_mean": self.difference / self.count,
                "logprob_difference_max": self.difference_max,
            }
        return found
