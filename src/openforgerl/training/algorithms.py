"""Advantages, the clipped policy loss and how tokens are weighed. Plain formulas; no model in sight.

Checked against veRL's `core_algos` by `tests/training/test_algorithms.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openforgerl.errors import InputError
from openforgerl.training.options import Aggregation
from openforgerl.types import Sample

_LOG_RATIO_BOUND = 20.0
"""exp(±20) is far outside every clip range; the bound keeps the ratio finite whatever the log-probs (as veRL)."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group, in the order of its rewards."""

    values: tuple[float, ...]
    degenerate: bool
    """All rewards are equal (or there is one): nothing to compare, all advantages are 0."""


def group_advantages(rewards_G: Sequence[float], *, normalise_std: bool = True, eps: float = 1e-6) -> GroupAdvantages:
    """Reward minus group mean, over the sample standard deviation plus `eps` (GRPO, arXiv 2402.03300 §4.1).

    The deviation is the unbiased one (divisor G - 1), as in veRL. Equal rewards give exact zeros, not rounding
    noise over `eps`. A single reward gives zero too; veRL gives the reward itself, which rewards being sampled.
    Raises ValueError for a reward that is not finite.
    """
    if not all(map(math.isfinite, rewards_G)):
        raise ValueError(f"rewards must be finite; got {list(rewards_G)}")
    if len(set(rewards_G)) < 2:
        return GroupAdvantages((0.0,) * len(rewards_G), degenerate=True)
    mean = math.fsum(rewards_G) / len(rewards_G)
    centred = [reward - mean for reward in rewards_G]
    if not normalise_std:
        return GroupAdvantages(tuple(centred), degenerate=False)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards_G) - 1))
    return GroupAdvantages(tuple(value / (deviation + eps) for value in centred), degenerate=False)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The weighted sum of token losses, and the ratio statistics of the tokens in the mask."""

    loss: Tensor
    """Scalar; carries the gradient."""
    ratio: Tensor
    """exp(logprob - old_logprob), detached; the shape of the inputs."""
    clipped: Tensor
    """bool; True where the clip range took the token's gradient away."""
    dual_clipped: Tensor
    """bool; True where the dual clip did."""


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    weight: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_dual: float = 3.0,
) -> PolicyLoss:
    """PPO's clipped objective with separate bounds (DAPO, arXiv 2503.14476 §3.1) and dual clip (1912.09729).

    All tensors have one shape, whatever it is; `mask` is bool or 0/1. The loss is Σ weight · mask · token loss:
    the aggregation (mean over tokens, rollouts or prompts) lives in `weight`, so that micro-batches of one batch
    add up to exactly the loss of the whole (see `token_weights`).
    """
    ratio = torch.exp((logprob - old_logprob).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))
    free = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = torch.maximum(free, bounded)
    ceiling = -advantage * clip_dual
    token_loss = torch.where(advantage < 0, torch.minimum(ceiling, clipped), clipped)
    inside = mask.bool()
    return PolicyLoss(
        loss=(torch.where(inside, token_loss, torch.zeros_like(token_loss)) * weight).sum(),
        ratio=ratio.detach(),
        clipped=inside & (bounded > free).detach(),
        dual_clipped=inside & (advantage < 0) & (clipped > ceiling).detach(),
    )


def token_weights(samples: Sequence[Sample], aggregation: Aggregation) -> list[float]:
    """The weight of every trained token of each sample; over all trained tokens they sum to 1.

    `token_mean`: every token the same (DAPO). `rollout_mean`: every rollout the same, its tokens share its weight
    over all its samples; with one sample a rollout this is veRL's seq-mean-token-mean. `prompt_mean`: every group
    the same. `Sample.weight` scales a sample against its peers inside that share. Rollouts and groups without a
    trained token count nowhere. Raises InputError for a negative weight.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.weight < 0:
            raise InputError(f"sample {sample.sample_id}: weight must be 0 or more; got {sample.weight}")
        parts[_share(sample, aggregation)].append(sample.weight * sample.trained_tokens)
    mass = {share: math.fsum(values) for share, values in parts.items()}  # fsum: the order of samples is no input
    shares = sum(1 for value in mass.values() if value > 0)
    return [
        sample.weight / (shares * mass[_share(sample, aggregation)]) if mass[_share(sample, aggregation)] > 0 else 0.0
        for sample in samples
    ]


def _share(sample: Sample, aggregation: Aggregation) -> str:
    match aggregation:
        case "token_mean":
            return ""
        case "rollout_mean":
            return sample.rollout_id
        case "prompt_mean":
            return sample.group_id
