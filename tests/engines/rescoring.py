"""What the engine recorded, and the judge: transformers' own forward, one text at a time, nothing cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Prompt, Sampling


@dataclass
class Record:
    """One call: prompt, and for every sampled id its log-prob and the version that sampled it."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperature: float = 1.0
    finish: str | None = None


def tiny(directory: Path, seed: int = 0) -> Path:
    return write_tiny_model(directory / f"tiny-{seed}", seed=seed)


def plain_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def numbers(seed: int, count: int) -> list[int]:
    """Ordinary ids (added tokens left out, so that nothing ends an answer early)."""
    return [random.Random(seed * 1000 + index).randrange(9, 500) for index in range(count)]


async def call(
    engine: TorchEngine,
    prompt: Sequence[int],
    *,
    stop_after: int | None = None,
    watch: Callable[[Record], None] | None = None,
    **sampling: Any,
) -> Record:
    """Run one call to its end, or leave after `stop_after` tokens. `watch` sees the record after every chunk."""
    record = Record(list(prompt), temperature=sampling.get("temperature", 1.0) or 1.0)
    stream = engine.generate(Prompt(ids=tuple(prompt)), Sampling(**sampling), affinity="session")
    async for chunk in stream:
        assert chunk.logprobs is not None
        record.ids += chunk.ids
        record.logprobs += chunk.logprobs
        record.versions += [chunk.weights_version] * len(chunk.ids)
        record.finish = chunk.finish
        if watch is not None:
            watch(record)
        if stop_after is not None and len(record.ids) >= stop_after:
            break
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    return record


@torch.no_grad()
def worst_difference(records: Sequence[Record], models: Mapping[int, Any]) -> float:
    """Largest |recorded - true| log-prob over every sampled token, under the version that sampled it."""
    worst = 0.0
    for record in records:
        for version in set(record.versions):
            text = torch.tensor([record.prompt + record.ids])
            logits = models[version](input_ids=text, use_cache=False).logits[0].float() / record.temperature
            start = len(record.prompt) - 1
            scores = logits[start:-1].log_softmax(-1)
            true = scores.gather(1, torch.tensor(record.ids)[:, None])[:, 0]
            mine = torch.tensor(record.versions) == version
            worst = max(worst, (true - torch.tensor(record.logprobs))[mine].abs().max().item())
    return worst
