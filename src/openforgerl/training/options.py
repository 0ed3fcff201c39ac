"""Options of SFT and GRPO. Light: no torch, so that the config room can compose them.

An unknown key in a config file is an error, not a silent default.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Aggregation = Literal["token_mean", "rollout_mean", "prompt_mean"]
"""How per-token losses become one number; see `algorithms.token_weights`."""


def _check(good: bool, name: str, accepted: str, value: object) -> None:
    if not good:
        raise ValueError(f"{name} must be {accepted}; got {value!r}")


class OptimizerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients become weights."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum (fp32) for the layers' matrices and AdamW for the rest. About twice as fast
    to a given SFT loss on small models; AdamW is the calmer choice for RL, hence the default."""
    lr: float = 2e-4
    """Peak learning rate. For `muon` it holds for both parts; 3e-3 suits a one-million-parameter model there."""
    weight_decay: float = 0.0
    """Decoupled, per step, times lr. Off, because RL moves weights too little to need it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates. 0.95, not 0.999: runs have tens of steps, a longer memory would never warm up."""
    momentum: float = 0.95
    """Muon's decay rate of the gradient average."""
    warmup_steps: int = 5
    """Optimizer steps over which the rate climbs linearly to `lr`."""
    decay: Literal["constant", "linear"] = "constant"
    """`linear`: from `decay_start` of the planned steps on, down to `final_lr_ratio` · lr at the last one."""
    decay_start: float = 0.5
    """Fraction of the planned steps after which a linear decay begins."""
    final_lr_ratio: float = 0.05
    """Rate at the last planned step as a fraction of `lr`, under linear decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this 2-norm over all parameters."""

    def __post_init__(self) -> None:
        _check(self.lr > 0 and math.isfinite(self.lr), "lr", "a finite number above 0", self.lr)
        _check(self.weight_decay >= 0, "weight_decay", "0 or more", self.weight_decay)
        _check(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)", self.betas)
        _check(0 <= self.momentum < 1, "momentum", "in [0, 1)", self.momentum)
        _check(self.warmup_steps >= 0, "warmup_steps", "0 or more", self.warmup_steps)
        _check(0 <= self.decay_start <= 1, "decay_start", "between 0 and 1", self.decay_start)
        _check(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", "between 0 and 1", self.final_lr_ratio)
        _check(self.max_grad_norm > 0, "max_grad_norm", "above 0", self.max_grad_norm)


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter that is trained in place of the model's own weights (needs `openforgerl[lora]`)."""

    rank: int = 16
    """Inner size of the two matrices beside each projection."""
    alpha: float = 32.0
    """Their product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the linear layers that get one, as `q_proj`; empty = all but the output head."""
    seed: int = 0
    """Of the first random values (one of the two matrices; the other is 0, so that the model is at first the base)."""

    def __post_init__(self) -> None:
        _check(self.rank >= 1, "rank", "1 or more", self.rank)
        _check(self.alpha > 0 and math.isfinite(self.alpha), "alpha", "a finite number above 0", self.alpha)


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every learner needs, whatever the loss."""

    optimizer: OptimizerOptions = OptimizerOptions()
    lora: LoraOptions | None = None
    """Train an adapter instead of all weights; null = all weights. Learning rates are about ten times as high then."""
    micro_batch_tokens: int = 4096
    """Most tokens computed in one forward pass, shared prefixes counted once. Bounds memory only: the gradient is
    that of the whole batch. A single longer row still goes through, alone."""
    min_shared_tokens: int = 8
    """Rows share a further stretch of prefix only when it is at least this long; shorter ones cost more in extra
    attention calls than they save."""
    temperature: float = 1.0
    """Sampling temperature of the recorded log-probs: logits are divided by it before log_softmax."""

    def __post_init__(self) -> None:
        _check(self.micro_batch_tokens >= 1, "micro_batch_tokens", "1 or more", self.micro_batch_tokens)
        _check(self.min_shared_tokens >= 1, "min_shared_tokens", "1 or more", self.min_shared_tokens)
        _check(
            self.temperature > 0 and math.isfinite(self.temperature),
            "temperature",
            "a finite number above 0",
            self.temperature,
        )


class SftOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised fine-tuning on recorded successes (paper: teacher rollouts, successes kept)."""

    learner: LearnerOptions = LearnerOptions(
        optimizer=OptimizerOptions(kind="muon", lr=3e-3, weight_decay=0.01, decay="linear", warmup_steps=10)
    )
    """Muon by default: SFT starts far from its optimum, where it saves the most time."""
    steps: int = 120
    """Optimizer steps in all. Data is walked in epochs, each in a new order."""
    batch_samples: int = 16
    """Samples per step."""
    aggregation: Aggregation = "token_mean"
    """Every trained token weighs the same, as in ordinary SFT."""
    validate_every: int = 20
    """Steps between validations (and checkpoints); also done after the last step. The curve starts at step 0."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept; the best by validation loss is kept besides."""
    seed: int = 0
    """Of the order of the data."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_samples", "validate_every", "keep_checkpoints"):
            value: int = getattr(self, name)
            _check(value >= 1, name, "1 or more", value)


class GrpoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group-relative policy optimisation on recorded rollouts, one update per step."""

    learner: LearnerOptions = LearnerOptions()
    steps: int = 37
    """Optimizer steps: each collects fresh groups, with the newest weights unless `max_staleness` says otherwise."""
    groups_per_step: int = 4
    """Tasks per step, one group each."""
    group_size: int = 4
    """Rollouts per task. Advantages compare these with each other, so at least 2."""
    max_staleness: int = 0
    """Steps by which collecting may run ahead of training. 0 = a step's rollouts start when the weights that it starts
    from are served. With n they start up to n weights versions earlier, while earlier steps are collected and trained;
    no token that is trained on is older than that."""
    updates_per_step: int = 1
    """Optimizer updates per step; each takes its own share of the step's groups, so that no rollout is trained
    twice. Above 1, later updates are off-policy by up to that many updates, which the clipping bounds."""
    normalise_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False is Dr. GRPO's choice."""
    clip_low: float = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """Ratio is clipped above at 1 + clip_high: more room upwards keeps rare tokens alive (DAPO's clip-higher)."""
    clip_dual: float = 3.0
    """For negative advantages the loss is bounded at this times |advantage| (dual-clip PPO)."""
    aggregation: Aggregation = "rollout_mean"
    """Every rollout weighs the same, however many calls, samples or tokens it took."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted over all rollouts of a step, so nothing can be learned from them."""
    served_difference: float | None = None
    """After each weight update the log-probs of served and trained weights are compared; a mean difference above
    this, in nats, stops training. None = 1e-3 where both compute in fp32 on this machine, else 0.05."""
    keep_checkpoints: int = 2
    """Latest recorded checkpoints kept."""
    seed: int = 0
    """Of the order of tasks and the permutation of rewards."""

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "updates_per_step", "keep_checkpoints"):
            value: int = getattr(self, name)
            _check(value >= 1, name, "1 or more", value)
        _check(self.max_staleness >= 0, "max_staleness", "0 or more", self.max_staleness)
        _check(self.group_size >= 2, "group_size", "2 or more (a group is compared with itself)", self.group_size)
        _check(
            self.updates_per_step <= self.groups_per_step,
            "updates_per_step",
            "at most groups_per_step",
            self.updates_per_step,
        )
        if self.served_difference is not None:
            _check(self.served_difference > 0, "served_difference", "above 0", self.served_difference)
        _check(0 < self.clip_low < 1, "clip_low", "between 0 and 1", self.clip_low)
        _check(self.clip_high > 0, "clip_high", "above 0", self.clip_high)
        _check(self.clip_dual > 1, "clip_dual", "above 1", self.clip_dual)
