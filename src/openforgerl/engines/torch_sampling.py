"""From logits to ids and log-probs, a batch at a time, every sequence with its own random numbers.

A sequence draws one uniform number a token and inverts the cumulative distribution, so that the same seed gives
the same answer whatever else is in the batch (as far as the logits agree: another batch size may round
differently in the last bit, and a draw that falls within that of a border may then go the other way).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openforgerl.types import Sampling


class Draws:
    """One sequence's sampling parameters, random numbers and, for penalties, what it has seen."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self.greedy = sampling.temperature == 0
        self.temperature = 1.0 if self.greedy else sampling.temperature
        """The temperature that log-probs are given at; 1 when greedy."""
        self.truncated = sampling.top_p < 1 or sampling.top_k > 0
        self.penalised = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        )
        self._random = random.Random(sampling.seed)
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if self.penalised:
            self._counts = torch.zeros(vocabulary, device=device)
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor(list(prompt_ids), device=device)] = True

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        return self._random.random()

    def note(self, id: int) -> None:
        """`id` was sampled."""
        if self._counts is not None and self._seen is not None:
            self._counts[id] += 1
            self._seen[id] = True

    def penalise(self, logits: Tensor) -> Tensor:
        """Repetition penalty over prompt and answer, then frequency and presence over the answer (vLLM's order)."""
        if self._counts is None or self._seen is None:
            return logits
        factor = self.sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(self._seen, repeated, logits)
        logits = logits - self.sampling.frequency_penalty * self._counts
        return logits - self.sampling.presence_penalty * (self._counts > 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one row sampled. `sampling_logprob` is under the distribution drawn from, where that is another."""

    id: int
    logprob: float
    sampling_logprob: float | None


def draw(logits: Tensor, draws: Sequence[Draws]) -> list[Drawn]:
    """Sample one id a row. logits (B, vocabulary) float32, one entry of `draws` a row.

    `logprob` is log_softmax(logits / T)[id] over the full vocabulary (T = 1 when greedy).
    """
    scaled = _divided(logits, draws)
    logprobs = torch.log_softmax(scaled, dim=-1)
    drawn_from = logprobs
    shaped = [row for row, entry in enumerate(draws) if entry.truncated or entry.penalised]
    if shaped:
        drawn_from = logprobs.clone()
        for row in shaped:
            entry = draws[row]
            own = entry.penalise(logits[row]) / entry.temperature
            drawn_from[row] = torch.log_softmax(truncate(own, entry.sampling), dim=-1)
    ids = _invert(drawn_from, [entry.uniform() for entry in draws])
    greedy = [row for row, entry in enumerate(draws) if entry.greedy]
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        ids[rows] = drawn_from[rows].argmax(dim=-1)
    picked = torch.stack([table.gather(1, ids[:, None])[:, 0] for table in (logprobs, drawn_from)]).tolist()
    result: list[Drawn] = []
    for row, (id, entry) in enumerate(zip(ids.tolist(), draws, strict=True)):
        shaped_row = entry.truncated or entry.penalised
        result.append(Drawn(id, picked[0][row], picked[1][row] if shaped_row else None))
        entry.note(id)
    return result


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p of what is left; the rest becomes -inf. logits (vocabulary,), already divided by T."""
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.double().softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = before >= sampling.top_p
        dropped[0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), float("-inf"))
    return logits


def _divided(logits: Tensor, draws: Sequence[Draws]) -> Tensor:
    if all(entry.temperature == 1 for entry in draws):
        return logits
    temperatures = torch.tensor([entry.temperature for entry in draws], device=logits.device)
    return logits / temperatures[:, None]


def _invert(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first id a row whose cumulative probability exceeds the row's uniform number."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    # Scaled by the true total, which rounding keeps from being exactly 1: an id of probability 0 is never drawn.
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)
