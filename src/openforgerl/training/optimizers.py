"""AdamW, or Muon in fp32 for the matrices, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from openforgerl.training.options import OptimizerOptions

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of the Muon write-up (Jordan et al. 2024): steep at zero, so that five rounds suffice."""


def orthogonalise(matrices_KRC: Tensor, rounds: int = 5) -> Tensor:
    """Nearly the nearest semi-orthogonal matrix of each in a stack (K matrices, R rows ≤ C columns).

    Singular values end between about 0.7 and 1.2. Batched, because a small model has many same-shape matrices.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices_KRC / (matrices_KRC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for 2-D parameters, in their own precision.

    torch's own Muon runs Newton-Schulz in bf16, which is slow on CPUs without bf16 instructions and not
    reproducible to fp32. The update is scaled by 0.2 · sqrt(larger side), so that its size per entry is about
    AdamW's and one learning rate serves both (arXiv 2502.16982 §2.2).
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; `closure`, if given, recomputes the loss first."""
        loss = closure() if closure else None
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                average: Tensor = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(average, group["momentum"])
                wide = update.T if update.shape[0] > update.shape[1] else update
                by_shape.setdefault((wide.shape[0], wide.shape[1]), []).append((param, wide))
            for (_, larger), entries in by_shape.items():
                stack = orthogonalise(torch.stack([wide for _, wide in entries]))
                for (param, _), update in zip(entries, stack, strict=True):
                    tall = param.shape[0] > param.shape[1]
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.T if tall else update, alpha=-group["lr"] * 0.2 * larger**0.5)
        return loss


def build_optimizers(model: nn.Module, options: OptimizerOptions) -> list[torch.optim.Optimizer]:
    """The optimizers that together own every trainable parameter once.

    Muon takes 2-D parameters that are neither an embedding nor the output head; AdamW all others. Weight decay
    touches matrices only: shrinking norms and biases has no use.
    """
    frozen_to_adamw = {
        id(param) for module in model.modules() if isinstance(module, nn.Embedding) for param in [module.weight]
    }
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        frozen_to_adamw.add(id(head.weight))
    trainable = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trainable if param.dim() == 2 and id(param) not in frozen_to_adamw]
    rest = [param for param in trainable if param.dim() != 2 or id(param) in frozen_to_adamw]
    if options.kind == "muon":
        muon = Muon(matrices, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
        if not rest:  # an adapter has nothing but matrices
            return [muon]
        return [muon, torch.optim.AdamW(rest, lr=options.lr, betas=options.betas, weight_decay=0.0)]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=options.betas)]


def learning_rate(options: OptimizerOptions, step: int, planned_steps: int | None) -> float:
    """The rate of 0-based optimizer step `step`: a pure function, so that a resumed run needs no scheduler state.

    `planned_steps` is the length of the run; a linear decay needs it and is constant without.
    """
    rate = options.lr * min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else options.lr
    if options.decay == "constant" or planned_steps is None:
        return rate
    start = options.decay_start * planned_steps
    last = planned_steps - 1
    if step <= start or last <= start:
        return rate
    progress = min(1.0, (step - start) / (last - start))
    return rate * (1 - progress * (1 - options.final_lr_ratio))
