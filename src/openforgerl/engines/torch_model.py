"""A Hugging Face causal language model whose attention is ours: loading, checking, swapping its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from openforgerl.engines.torch_attention import ATTENTION, Fill, Step, packed_attention
from openforgerl.engines.torch_fused import FusedDecoder
from openforgerl.engines.torch_kv import Segment
from openforgerl.errors import EngineError, InputError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary variants whose angles change with the length of the text: cached keys would be wrong."""


class PackedModel:
    """A causal language model that runs `Step`s. The model given is taken over: its attention is replaced."""

    def __init__(self, model: Any) -> None:
        """Raises EngineError when the model needs more than ordinary causal attention."""
        self._model = model.eval()
        config = model.config.get_text_config()
        _refuse_unordinary(config)
        self.layers: int = config.num_hidden_layers
        self.key_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        weight: Tensor = model.get_input_embeddings().weight
        self.dtype, self.device = weight.dtype, weight.device
        reference = self._reference_logits()
        AttentionInterface.register(ATTENTION, packed_attention)
        model.set_attn_implementation(ATTENTION)
        self._fused: FusedDecoder | None = None
        differs = self._difference(reference)
        if not differs <= self._allowed:
            raise EngineError(
                f"{type(model).__name__} does not give its own log-probs with packed attention (they differ by "
                f"{differs:.3g}): the torch engine cannot run it"
            )
        if FusedDecoder.fits(model):
            self._fused = FusedDecoder(model)
            if not self._difference(reference) <= self._allowed:
                self._fused = None

    @property
    def fused(self) -> bool:
        """Whether the fast forward pass is in use; otherwise transformers' own modules run."""
        return self._fused is not None

    @property
    def _allowed(self) -> float:
        """Largest log-prob difference that rounding may explain."""
        return 1e-3 if self.dtype == torch.float32 else 0.25

    @classmethod
    def load(cls, directory: Path, *, dtype: torch.dtype, device: str) -> PackedModel:
        """Load a model directory. Raises InputError when it is none, EngineError when we cannot run it."""
        if not (directory / "config.json").is_file():
            raise InputError(f"{directory} is no model directory: config.json is missing")
        loader: Any = AutoModelForCausalLM
        shows_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # our own progress display must not be torn
        try:
            model = loader.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"{directory}: transformers cannot load this model: {error}") from error
        finally:
            if shows_bars:
                logging.enable_progress_bar()
        return cls(model.to(device))

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as the model's generation config (else its config) says."""
        for config in (getattr(self._model, "generation_config", None), self._model.config):
            ids: int | Sequence[int] | None = getattr(config, "eos_token_id", None)
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    def forward(self, step: Step) -> Tensor:
        """Logits (len(step.logits_at), vocabulary) in float32; the step's keys and values are stored on the way."""
        if self._fused is not None:
            return self._fused.forward(step).float()
        output = self._model(
            input_ids=step.ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.logits_at,
            engine_step=step,
        )
        return output.logits[0].float()

    def bytes_per_token(self) -> int:
        """Memory that the keys and values of one token take."""
        return 2 * self.layers * self.key_heads * self.width * self.dtype.itemsize

    def segment(self, tokens: int) -> Segment:
        """Room for the keys and values of `tokens` tokens."""
        shape = (self.layers, tokens, self.key_heads, self.width)
        return Segment(
            torch.zeros(shape, dtype=self.dtype, device=self.device),
            torch.zeros(shape, dtype=self.dtype, device=self.device),
        )

    def replace_weights(self, weights: Path | Mapping[str, object]) -> None:
        """Overwrite all parameters. Raises InputError naming the first wrong one, before anything is changed."""
        given = read_weights(weights) if isinstance(weights, Path) else weights
        own: dict[str, Tensor] = self._model.state_dict()
        tied = {name for name in own if name not in given and _is_tied(own, name, given)}
        missing = sorted(set(own) - set(given) - tied)
        unknown = sorted(set(given) - set(own))
        if missing or unknown:
            raise InputError(
                f"weights do not fit the model: {len(missing)} missing (first: {missing[:1]}), "
                f"{len(unknown)} unknown (first: {unknown[:1]})"
            )
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.shape != own[name].shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"weight {name} must have shape {tuple(own[name].shape)}, got {shape}")
        with torch.no_grad():
            for name, value in given.items():
                if isinstance(value, Tensor):
                    own[name].copy_(value)
            if self._fused is not None:
                self._fused.refresh()

    def _reference_logits(self) -> Tensor:
        with torch.inference_mode():
            return self._model(input_ids=self._probe(), use_cache=False).logits[0].float()

    def _probe(self) -> Tensor:
        ids = torch.arange(24, device=self.device) * 7919 % self.vocabulary
        return ids[None]

    def _difference(self, reference: Tensor) -> float:
        """Largest difference from the model's own log-probs, in two chunks of which the second sees the first."""
        ids, own = self._probe(), self.segment(24)
        logits: list[Tensor] = []
        with torch.inference_mode():
            for start, stop in ((0, 14), (14, 24)):
                positions = torch.arange(start, stop, device=self.device)
                step = Step(
                    ids=ids[:, start:stop],
                    positions=positions[None],
                    logits_at=positions - start,
                    fills=[Fill(start=0, stop=stop - start, past=(), own=own, done=start)],
                )
                try:
                    logits.append(self.forward(step))
                except RuntimeError as error:
                    raise EngineError(f"{type(self._model).__name__} does not run with packed attention") from error
        return (torch.cat(logits).log_softmax(-1) - reference.log_softmax(-1)).abs().max().item()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of a model directory (one file or a sharded index)."""
    index = path / "model.safetensors.index.json"
    try:
        if path.is_file():
            return load_file(path)
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            return {name: value for file in names for name, value in load_file(path / file).items()}
        return load_file(path / "model.safetensors")
    except OSError as error:
        raise InputError(f"no weights in {path}: {error}") from error


def _is_tied(own: Mapping[str, Tensor], name: str, given: Mapping[str, object]) -> bool:
    """Whether `name` shares its memory with a parameter that is given."""
    return any(other in given and own[other].data_ptr() == own[name].data_ptr() for other in own)


def _refuse_unordinary(config: Any) -> None:
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    unordinary = sorted({kind for kind in kinds if kind != "full_attention"})
    if unordinary:
        raise EngineError(f"the torch engine runs full attention only; this model has {', '.join(unordinary)} layers")
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError("the torch engine runs decoder-only models; this one has an encoder")
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise EngineError(f"the torch engine cannot cache keys under {rope['rope_type']} rotary embeddings")
