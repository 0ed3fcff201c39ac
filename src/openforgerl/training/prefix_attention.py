"""Attention over a packed tree of rows: causal inside a segment, full from everything below onto it.

Each pair (queries, segment) is attended by itself, and the partial results are merged by their log-sum-exps, so no
key of a shared prefix is copied and no masked product is computed. The backward pass hands every partial kernel
the *merged* output and log-sum-exp, with which its gradients are exactly its share of the whole (the algebra of
ring attention, arXiv 2310.01889 §3).

Registered with `transformers.AttentionInterface`: any causal LM whose layers call the attention interface with
plain scaled dot products trains packed. What it cannot do (sliding window shorter than a row, soft-capping,
sinks, dropout) it refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from openforgerl.errors import InputError
from openforgerl.training.packing import Segment

ATTENTION_NAME = "openforgerl_prefix_tree"
"""`config._attn_implementation` of a model that the learner owns."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TreeAttention(torch.autograd.Function):
    """(1, heads, N, head_dim) queries, keys and values of one packed row; CPU flash kernels."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        merged_out = torch.zeros(query.shape, dtype=wide)
        total = torch.full(query.shape[:3], -torch.inf, dtype=wide)
        for part in segments:
            own = slice(part.start, part.stop)
            below = slice(part.stop, part.end)
            for rows, causal in ((own, True), (below, False)):
                if rows.start == rows.stop:
                    continue
                partial, lse = _flash(query[:, :, rows], key[:, :, own], value[:, :, own], 0.0, causal, scale=scale)
                before = total[:, :, rows]
                merged = torch.logaddexp(before, lse)
                kept = torch.exp(before - merged)[..., None]
                added = torch.exp(lse - merged)[..., None]
                merged_out[:, :, rows] = merged_out[:, :, rows] * kept + partial * added
                total[:, :, rows] = merged
        out = merged_out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, total = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for part in ctx.segments:
            own = slice(part.start, part.stop)
            below = slice(part.stop, part.end)
            for rows, causal in ((own, True), (below, False)):
                if rows.start == rows.stop:
                    continue
                of_query, of_key, of_value = _flash_backward(
                    grad_out[:, :, rows].contiguous(),
                    query[:, :, rows],
                    key[:, :, own],
                    value[:, :, own],
                    out[:, :, rows].contiguous(),
                    total[:, :, rows],
                    0.0,
                    causal,
                    scale=ctx.scale,
                )
                grad_query[:, :, rows] += of_query
                grad_key[:, :, own] += of_key
                grad_value[:, :, own] += of_value
        return grad_query, grad_key, grad_value, None, None


def tree_mask(segments: tuple[Segment, ...], length: int, device: torch.device) -> Tensor:
    """bool (N, N): True where packed id i sees packed id j. What the kernels compute, written out."""
    mask = torch.zeros(length, length, dtype=torch.bool, device=device)
    for part in segments:
        size = part.stop - part.start
        mask[part.start : part.stop, part.start : part.stop] = torch.ones(size, size, device=device).tril().bool()
        mask[part.stop : part.end, part.start : part.stop] = True
    return mask


def tree_attention(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], *, scale: float) -> Tensor:
    """Attention output (1, heads, N, head_dim) of a packed row; all three inputs have the same heads.

    On CPU by the flash kernels; on other devices by scaled-dot-product attention under `tree_mask` (N² memory).
    """
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        result: Tensor = _TreeAttention.apply(query, key, value, segments, scale)  # pyright: ignore[reportAssignmentType]
        return result
    mask = tree_mask(segments, query.shape[2], query.device)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls. The learner passes `segments` through the model's own keyword arguments.

    `query` (1, heads, N, head_dim), `key` and `value` (1, key-value heads, N, head_dim) → (1, N, heads, head_dim).
    Raises InputError when segments are missing or the layer wants something that the tree cannot give.
    """
    segments: tuple[Segment, ...] | None = kwargs.get("segments")
    if segments is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise InputError(f"attention {ATTENTION_NAME!r} takes one packed row with its segments; use a Learner")
    window: int | None = kwargs.get("sliding_window")
    if window is not None and window < kwargs.get("longest_row", query.shape[2]):
        raise InputError(f"sliding_window {window} is shorter than a row: this model cannot be trained packed")
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if dropout or attention_mask is not None:
        unsupported.append("dropout" if dropout else "attention_mask")
    if unsupported:
        raise InputError(f"this model's attention uses {', '.join(unsupported)}: it cannot be trained packed")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = tree_attention(query, key, value, segments, scale=scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
