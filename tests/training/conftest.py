"""A tiny random Qwen3 and synthetic samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from openforgerl.types import Sample, Source, Span

VOCABULARY = 61


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Two layers, four query heads on two key-value heads, untied or tied embeddings, about 20,000 weights."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,  # large enough that attention matters to the output
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).float().eval()


def sample(
    name: str,
    ids: Sequence[int],
    trained: Sequence[tuple[int, int]],
    *,
    logprobs: Sequence[float] | None = None,
    masked: Sequence[tuple[int, int]] = (),
    rollout: str | None = None,
    group: str = "g",
    advantage: float | None = None,
    weight: float = 1.0,
    source: Source = Source.POLICY,
) -> Sample:
    """A Sample whose spans are `trained` and `masked` half-open ranges of `ids`."""
    ranges = sorted([(*place, "trained") for place in trained] + [(*place, "masked") for place in masked])
    spans = tuple(
        Span(
            start=start,
            stop=stop,
            call_id=f"{name}-c{number}",
            offset=0,
            state=state,
            reason=None if state == "trained" else "test",
        )
        for number, (start, stop, state) in enumerate(ranges)
    )
    return Sample(
        sample_id=name,
        attempt_id=f"{rollout or name}-a1",
        rollout_id=rollout or name,
        group_id=group,
        ids=tuple(ids),
        spans=spans,
        logprobs=None if logprobs is None else tuple(logprobs),
        source=source,
        advantage=advantage,
        weight=weight,
    )


@pytest.fixture
def make_model() -> Callable[..., Qwen3ForCausalLM]:
    return tiny_qwen3


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return sample
