"""Muon in fp32: torch's own runs Newton-Schulz in bf16, which is slow on CPUs without hardware bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of the Muon write-up (Jordan et al. 2024), tuned for a steep slope at zero."""


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest semi-orthogonal matrices of a stack (n, rows, columns) with rows ≤ columns."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonalised update, for matrices; same-shape matrices go through together.

    The update is scaled by 0.2·sqrt(larger side), so that the learning rate is comparable to AdamW's
    (Liu et al. 2025, "Muon is scalable").
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 3e-3, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
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
                velocity = self.state[param].setdefault("velocity", torch.zeros_like(param))
                velocity.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(velocity, group["momentum"])
                rows, columns = update.shape
                wide = update.T if rows > columns else update
                by_shape.setdefault((wide.shape[0], wide.shape[1]), []).append((param, wide))
            for (_, larger), entries in by_shape.items():
                ready = orthogonalise(torch.stack([wide for _, wide in entries]))
                for (param, _), update in zip(entries, ready, strict=True):
                    tall = param.shape[0] > param.shape[1]
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.T if tall else update, alpha=-group["lr"] * 0.2 * larger**0.5)
        return loss


def muon_and_adamw(model: nn.Module, lr: float, weight_decay: float = 0.01) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        (matrices if param.dim() == 2 and "embed" not in name else others).append(param)
    return [
        Muon(matrices, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def set_lr(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """The same learning rate for every group."""
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = optimizer.param_groups
        for group in groups:
            group["lr"] = lr
