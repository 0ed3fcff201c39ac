"""Low-rank adapters (arXiv 2106.09685): the base stays as it is, small matrices beside its projections are trained.

peft puts them in and writes them. What is served, audited and started from is never base plus adapter but their sum: a
checkpoint is a whole model directory, so an engine needs to know nothing of adapters, and every weights version is
one set of weights. The adapter lies beside it in peft's own files, for the learner to go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from openforgerl.errors import InputError, TrainingError
from openforgerl.training.options import LoraOptions

WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
"""peft's files name weights as its own wrapper of a model does."""
_ROUNDING = 1e-5
"""Largest relative difference of a sum computed again: another machine may round another way."""


class LoraAdapter:
    """The adapter in a model, whose own weights it froze."""

    def __init__(self, model: PreTrainedModel, options: LoraOptions) -> None:
        """Changes `model` in place. Raises InputError when a target names no linear layer of it."""
        targets = list(options.targets) or "all-linear"
        self._config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] (only divided by the rank)
            target_modules=targets,
            lora_dropout=0.0,  # log-probs must be those of the policy that sampled
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(model.name_or_path),
            inference_mode=False,
        )
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            try:
                inject_adapter_in_model(self._config, model, _NAME)  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                raise InputError(f"learner.lora.targets {targets}: {error}") from error
        self._model = model

    def state(self) -> dict[str, Tensor]:
        """Its weights, under peft's names."""
        found: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=_NAME, save_embedding_layers=False
        )
        return {_PREFIX + name: value for name, value in found.items()}

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The model's weights with the adapter added, under the names that the model has without one."""
        own: dict[str, Tensor] = self._model.state_dict()
        whole = {name.replace(".base_layer.", "."): value for name, value in own.items() if ".lora_" not in name}
        for name, module in self._model.named_modules():
            if isinstance(module, LoraLayer):
                layer: Any = module
                whole[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight(_NAME)
        return whole

    def restore(self, weights: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> None:
        """Take over an adapter's weights. `merged`: the sum as it was saved. TrainingError when they are of another
        adapter, or the sum shows that they were trained on another base; then unchanged."""
        own = self.state()
        odd = sorted(
            {name for name in own if name not in weights}
            | {name for name in weights if name not in own or weights[name].shape != own[name].shape}
        )
        if odd:
            raise TrainingError(
                f"the checkpoint's adapter is another (rank, targets or model differ): {', '.join(odd[:3])}"
            )
        before = {name: value.clone() for name, value in own.items()}
        self._copy(weights)
        now = self.merged()
        foreign = [name for name, value in merged.items() if name not in now or not _equal(value, now[name])]
        if foreign:
            self._copy(before)
            raise TrainingError(
                f"the checkpoint's adapter was trained on another base model: with this one {foreign[0]} is not what "
                "was saved. Start from the model directory that the run began with"
            )

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in self.state().items():
            value.copy_(weights[name])

    def write(self, directory: Path) -> None:
        """peft's two files, in a new directory: `PeftModel.from_pretrained(base, directory)` reads them."""
        directory.mkdir()
        save_file({name: value.contiguous() for name, value in self.state().items()}, directory / WEIGHTS)
        self._config.save_pretrained(str(directory))


def _equal(saved: Tensor, computed: Tensor) -> bool:
    same = saved.shape == computed.shape
    return same and float((saved - computed).abs().max()) <= _ROUNDING * max(1e-3, float(saved.abs().max()))
