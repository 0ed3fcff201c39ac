"""Attention over packed tokens whose keys and values lie in several places.

A step of the engine runs many sequences through the model at once as one packed row of tokens. What a token may
see is spread over shared segments (a common prefix, kept once whoever uses it) and its sequence's own keys.
Each part is attended on its own and the parts are merged by their log-sum-exp, which gives the softmax over
all of them: with parts a and b, `out = a + sigmoid(lse_b - lse_a) * (b - a)`.

Shapes: H query heads, G key heads (H = G * group), D head width, N packed tokens, B decoding sequences,
T tokens of a part. What was run: the CPU path (flash kernel, fp32) and, by switching the kernel off, the
device-neutral path on CPU. No GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from openforgerl.errors import EngineError

ATTENTION = "openforgerl_packed"
"""Name under which `packed_attention` is registered with transformers."""

FLASH_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The CPU flash kernel, which returns the log-sum-exp too; a private operator, so it may be absent."""


class KeysValues(Protocol):
    """Keys and values of consecutive tokens: each (layers, tokens, G, D)."""

    k: Tensor
    v: Tensor


@dataclass(slots=True)
class Fill:
    """A chunk of one sequence's prompt: packed tokens `[start, stop)`, its `past` and where its KV goes."""

    start: int
    stop: int
    past: Sequence[KeysValues]
    """Shared segments from the sequence's first token on."""
    own: KeysValues
    """The sequence's buffer behind `past`; tokens `[done, done + stop - start)` are written by this step."""
    done: int


@dataclass(slots=True)
class Step:
    """What one forward pass does. Decoding rows come first in the packed row, then the fills."""

    ids: Tensor
    """(1, N) int64."""
    positions: Tensor
    """(1, N) int64."""
    logits_at: Tensor
    """Packed indices whose logits are wanted."""
    decoding: int = 0
    """B: rows `[0, B)` of `rows` each decode one token."""
    rows: KeysValues | None = None
    """Row buffers (layers, rows, capacity, G, D); a row holds its sequence's own keys."""
    write_at: Tensor | None = None
    """(B) flat index row * capacity + length where each row's new key goes."""
    longest: int = 0
    """Most keys of a row, the new one included."""
    mask: Tensor | None = None
    """(B, 1, 1, longest): 0 where a key exists, -inf elsewhere; None when all rows are equally long."""
    groups: Sequence[tuple[KeysValues, Tensor | None]] = ()
    """Shared segments and the rows that see them; None = all rows."""
    fills: Sequence[Fill] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store this layer's new keys and attend. q (1, H, N, D); k, v (1, G, N, D); returns (1, N, H, D)."""
        q, k, v = q[0], k[0], v[0]
        parts = [self._decode(layer, q, k, v, scale)] if self.decoding else []
        parts += [_fill(fill, layer, q, k, v, scale) for fill in self.fills]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.transpose(0, 1).unsqueeze(0)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, write_at, count = self.rows, self.write_at, self.decoding
        assert rows is not None and write_at is not None
        heads, width = q.shape[0], q.shape[2]
        key_heads = k.shape[0]
        q = q[:, :count]
        own: list[Tensor] = []
        for buffer, new in ((rows.k[layer], k), (rows.v[layer], v)):
            buffer.view(-1, key_heads, width).index_copy_(0, write_at, new[:, :count].transpose(0, 1))
            own.append(buffer[:count, : self.longest].transpose(1, 2))
        per_row = q.transpose(0, 1).reshape(count, key_heads, heads // key_heads, width)
        out, lse = attend(per_row, own[0], own[1], scale=scale, mask=self.mask)
        out = out.reshape(count, heads, width).transpose(0, 1)
        lse = lse.reshape(count, heads).transpose(0, 1)
        for segment, members in self.groups:
            if members is None:
                out, lse = merge(out, lse, *_see(q, segment, layer, scale))
            else:
                seen = _see(q.index_select(1, members), segment, layer, scale)
                merged = merge(out.index_select(1, members), lse.index_select(1, members), *seen)
                out = out.index_copy(1, members, merged[0])
                lse = lse.index_copy(1, members, merged[1])
        return out


def _fill(fill: Fill, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (tensor[:, fill.start : fill.stop] for tensor in (q, k, v))
    end = fill.done + fill.stop - fill.start
    own_k, own_v = fill.own.k[layer], fill.own.v[layer]
    own_k[fill.done : end] = k.transpose(0, 1)
    own_v[fill.done : end] = v.transpose(0, 1)
    group = q.shape[0] // k.shape[0]
    if group > 1:
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out, lse = (tensor[0] for tensor in attend(q[None], k[None], v[None], scale=scale, causal=True))
    for segment in fill.past:
        out, lse = merge(out, lse, *_see(q, segment, layer, scale))
    if fill.done:
        seen = _see_keys(q, own_k[: fill.done], own_v[: fill.done], scale)
        out, lse = merge(out, lse, *seen)
    return out


def _see(q: Tensor, segment: KeysValues, layer: int, scale: float) -> tuple[Tensor, Tensor]:
    return _see_keys(q, segment.k[layer], segment.v[layer], scale)


def _see_keys(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key. q (H, T, D); k, v (P, G, D) → (H, T, D), (H, T)."""
    heads, count, width = q.shape
    key_heads = k.shape[1]
    # The query heads of one key head are just more queries, so that no key is ever repeated.
    stacked = q.reshape(1, key_heads, heads // key_heads * count, width)
    out, lse = attend(stacked, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    return out.reshape(heads, count, width), lse.reshape(heads, count)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each. out (..., D), lse (...)."""
    weight = torch.sigmoid(other_lse - lse).to(out.dtype).unsqueeze(-1)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp: (B, H, T, D), (B, H, T). `causal` needs as many keys as queries."""
    if FLASH_KERNEL is not None and q.device.type == "cpu":
        return FLASH_KERNEL(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(-2, -1)).float() * scale
    if causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp().to(v.dtype), v), lse


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function registered with transformers; `engine_step` travels through the model's keyword arguments."""
    step: Step | None = kwargs.get("engine_step")
    if step is None:
        raise EngineError(f"{type(module).__name__} does not pass its caller's arguments to attention")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(f"{type(module).__name__} needs {name}, which the torch engine does not do")
    if attention_mask is not None or value.shape != key.shape:
        raise EngineError(f"{type(module).__name__}: the torch engine does ordinary causal attention only")
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return step.attend(module.layer_idx, query, key, value, scale), None
