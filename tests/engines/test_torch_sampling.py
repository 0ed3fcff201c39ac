"""Drawing ids: the right distribution, the right log-probs, truncation, penalties, and one's own random numbers."""

from __future__ import annotations

import math

import pytest
import torch

from openforgerl.engines.torch_sampling import Draws, draw, truncate
from openforgerl.types import Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.5])


def draws(prompt: tuple[int, ...] = (), **sampling: object) -> Draws:
    return Draws(Sampling(**sampling), prompt, len(LOGITS), CPU)  # type: ignore[arg-type]


def chi_square(ids: list[int], expected: torch.Tensor) -> float:
    observed = torch.bincount(torch.tensor(ids), minlength=len(expected)).double()
    expected = expected.double() * len(ids)
    return ((observed - expected) ** 2 / expected).sum().item()


LIMIT = 29.88
"""Chi-square with 7 degrees of freedom exceeds this once in 10,000 fair tests."""


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    rows = [draws(temperature=temperature, seed=seed) for seed in range(50)]
    ids = [drawn.id for _ in range(200) for drawn in draw(LOGITS.expand(50, -1), rows)]
    assert chi_square(ids, (LOGITS / temperature).softmax(-1)) < LIMIT


def test_an_unfair_draw_is_caught() -> None:
    class Unfair(Draws):
        def uniform(self) -> float:
            return super().uniform() ** 1.1

    rows = [Unfair(Sampling(seed=seed), (), len(LOGITS), CPU) for seed in range(50)]
    ids = [drawn.id for _ in range(200) for drawn in draw(LOGITS.expand(50, -1), rows)]
    assert chi_square(ids, LOGITS.softmax(-1)) > LIMIT


def test_truncated_draws_follow_the_renormalised_softmax() -> None:
    rows = [draws(top_k=3, seed=seed) for seed in range(50)]
    results = [drawn for _ in range(40) for drawn in draw(LOGITS.expand(50, -1), rows)]
    kept = torch.tensor([1.0, 2.0, 1.5]).softmax(-1)  # ids 0, 3 and 6
    assert {drawn.id for drawn in results} == {0, 3, 6}
    # 2 degrees of freedom: above 18.4 once in 10,000
    assert chi_square([(0, 3, 6).index(drawn.id) for drawn in results], kept) < 18.4
    whole = LOGITS.log_softmax(-1)
    for drawn in results[:20]:
        assert drawn.logprob == pytest.approx(whole[drawn.id].item(), abs=1e-6)
        assert drawn.sampling_logprob == pytest.approx(math.log(kept[(0, 3, 6).index(drawn.id)]), abs=1e-5)


def test_truncation_keeps_what_its_definition_says() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for top_p, kept in ((0.3, 1), (0.4, 1), (0.41, 2), (0.71, 3), (0.95, 4), (1.0, 4)):
        assert truncate(logits, Sampling(top_p=top_p)).isfinite().sum().item() == kept, top_p
    both = truncate(logits, Sampling(top_k=2, top_p=0.58))  # of 4/7 and 3/7, 4/7 = 0.571 is not enough
    assert both.isfinite().tolist() == [True, True, False, False]
    both = truncate(logits, Sampling(top_k=2, top_p=0.57))
    assert both.isfinite().tolist() == [True, False, False, False]


def test_greedy_takes_the_best_at_temperature_one() -> None:
    (drawn,) = draw(LOGITS[None], [draws(temperature=0)])
    assert drawn.id == 3
    assert drawn.logprob == pytest.approx(LOGITS.log_softmax(-1)[3].item(), abs=1e-6)
    assert drawn.sampling_logprob is None


def test_an_impossible_id_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])

    class Edge(Draws):
        value = 0.0

        def uniform(self) -> float:
            return self.value

    for value, id in ((0.0, 1), (0.4999, 1), (0.5, 3), (math.nextafter(1.0, 0.0), 3)):
        row = Edge(Sampling(), (), 5, CPU)
        row.value = value
        (drawn,) = draw(logits[None], [row])
        assert (drawn.id, drawn.logprob) == (id, pytest.approx(math.log(0.5)))


def test_penalties() -> None:
    row = draws(prompt=(3,), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, temperature=0)
    row.note(0)
    row.note(0)
    row.note(2)
    # id 0: 1/2 - 2*0.25 - 0.5; id 2: -1*2 - 0.25 - 0.5; id 3 (prompt only): 2/2; others as they are
    expected = torch.tensor([-0.5, 0.0, -2.75, 1.0, 0.5, -3.0, 1.5, -0.5])
    assert torch.equal(row.penalise(LOGITS), expected)
    (drawn,) = draw(LOGITS[None], [row])
    assert drawn.id == 6
    assert drawn.logprob == pytest.approx(LOGITS.log_softmax(-1)[6].item(), abs=1e-6)
    assert drawn.sampling_logprob == pytest.approx(expected.log_softmax(-1)[6].item(), abs=1e-6)


def test_a_row_is_its_own() -> None:
    """Same seed, same ids, whoever else is in the batch, and mixed parameters do not leak."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(1, 8, generator=generator) for _ in range(30)]

    def run(before: int, after: int) -> list[int]:
        others = [draws(temperature=0.5, top_k=2, seed=90 + index) for index in range(before + after)]
        mine = draws(seed=4)
        rows = [*others[:before], mine, *others[before:]]
        noise = torch.Generator().manual_seed(before + 10 * after)
        ids: list[int] = []
        for logits in steps:
            batch = torch.randn(len(rows), 8, generator=noise)
            batch[before] = logits
            ids.append(draw(batch, rows)[before].id)
        return ids

    alone = run(0, 0)
    assert len(set(alone)) > 3
    assert run(5, 0) == run(0, 7) == run(2, 9) == alone


def test_a_broken_row_breaks_no_other() -> None:
    batch = torch.stack([torch.full((8,), float("nan")), LOGITS])
    broken, fine = draw(batch, [draws(seed=1), draws(seed=2)])
    (alone,) = draw(LOGITS[None], [draws(seed=2)])
    assert math.isnan(broken.logprob)
    assert fine == alone
