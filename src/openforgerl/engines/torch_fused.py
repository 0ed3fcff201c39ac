"""The forward pass of Llama-shaped decoders with few kernels a layer.

For models of a few million parameters nearly all the time of a step goes into starting small kernels. Here the
three projections before attention are one, as are the two before the activation, and queries and keys are
normalised and rotated together. The parameters stay the model's own: they become views of the joined matrices,
so that loading weights needs no second copy. Used only for architectures listed here and only when its logits
agree with transformers' own at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from openforgerl.engines.torch_attention import Step

FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers are: norm, attention (with or without query and key norms), norm, gated SiLU."""


class FusedDecoder:
    """Runs steps with the parameters of a transformers causal language model of one of `FUSED_TYPES`."""

    def __init__(self, model: Any) -> None:
        """Joins the model's projections in place. Raises AttributeError when it is built otherwise."""
        config = model.config
        self._model = model
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._layers = [_FusedLayer(layer, self._heads, self._key_heads) for layer in model.model.layers]

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model is of a listed type with the usual activation and no biases outside q, k and v."""
        config = model.config
        if config.model_type not in FUSED_TYPES or config.hidden_act != "silu":
            return False
        return not any(
            projection.bias is not None
            for layer in model.model.layers
            for projection in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        )

    def refresh(self) -> None:
        """Take over what is derived from parameters; call it after they have changed."""
        for layer in self._layers:
            layer.refresh()

    def forward(self, step: Step) -> Tensor:
        """Logits (len(step.logits_at), vocabulary) in the model's dtype."""
        body = self._model.model
        hidden = body.embed_tokens(step.ids[0])
        cos, sin = (table[0].unsqueeze(1) for table in body.rotary_emb(hidden, step.positions))
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == swap_halves(x) * signed_sin
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for index, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, cos, signed_sin, step, index)
        hidden = hidden.index_select(0, step.logits_at)
        return self._model.lm_head(_norm(hidden, body.norm))


class _FusedLayer:
    """One decoder layer; hidden states are (N, hidden)."""

    def __init__(self, layer: Any, heads: int, key_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._heads, self._key_heads = heads, key_heads
        self._scale: float = attention.scaling
        self._width: int = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = _join_in_place([projection.weight for projection in projections])
        biases = [projection.bias for projection in projections]
        self._qkv_bias = None if biases[0] is None else _join_in_place(biases)
        self._gate_up = _join_in_place([mlp.gate_proj.weight, mlp.up_proj.weight])
        self._qk_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self._qk_scale: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """The norms' weights, one row a head."""
        if self._qk_norms is not None:
            weights = [norm.weight.detach() for norm in self._qk_norms]
            rows = zip(weights, (self._heads, self._key_heads), strict=True)
            self._qk_scale = torch.cat([weight.expand(count, -1) for weight, count in rows])

    def forward(self, hidden: Tensor, cos: Tensor, signed_sin: Tensor, step: Step, index: int) -> Tensor:
        layer, heads, turned = self._layer, self._heads, self._heads + self._key_heads
        joined = functional.linear(_norm(hidden, layer.input_layernorm), self._qkv, self._qkv_bias)
        joined = joined.view(-1, turned + self._key_heads, self._width)
        qk, v = joined[:, :turned], joined[:, turned:]
        if self._qk_norms is not None and self._qk_scale is not None:
            qk = functional.rms_norm(qk, (self._width,), None, self._qk_norms[0].variance_epsilon) * self._qk_scale
        qk = torch.addcmul(qk * cos, qk.roll(self._width // 2, -1), signed_sin)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (qk[:, :heads], qk[:, heads:], v))
        seen = step.attend(index, q, k, v, self._scale).reshape(hidden.shape[0], -1)
        hidden = torch.addmm(hidden, seen, layer.self_attn.o_proj.weight.t())
        gate, up = functional.linear(_norm(hidden, layer.post_attention_layernorm), self._gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate) * up, layer.mlp.down_proj.weight.t())


def _norm(hidden: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def _join_in_place(parameters: Sequence[Any]) -> Tensor:
    """One tensor of all, of which the parameters become views."""
    whole = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        end = at + parameter.shape[0]
        parameter.data = whole[at:end]
        at = end
    return whole
