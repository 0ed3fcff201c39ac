"""Advantages, token weights and the clipped loss: by hand, and against veRL's recorded numbers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import InputError
from openforgerl.training.algorithms import group_advantages, policy_loss, token_weights
from openforgerl.training.options import Aggregation
from openforgerl.types import Sample

from .conftest import sample

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "verl_losses.json").read_text())


def test_golden_file_says_where_it_comes_from() -> None:
    assert GOLDEN["verl"] == "0.9.1"
    assert GOLDEN["torch"].startswith("2.13.0")
    assert GOLDEN["made_by"] == "scripts/golden_losses.py"


@pytest.mark.parametrize("case", GOLDEN["advantages"], ids=lambda case: f"{case['name']}-{case['normalise_std']}")
def test_advantages_equal_verl(case: dict[str, Any]) -> None:
    mine = group_advantages(case["rewards"], normalise_std=case["normalise_std"])
    assert mine.values == pytest.approx(case["advantages"], abs=1e-6)
    assert mine.degenerate == (case["name"] == "all_equal")


def golden_weights(mode: str, mask: torch.Tensor) -> torch.Tensor:
    """What veRL's aggregation modes are, as token weights."""
    tokens = mask.sum(1, keepdim=True)
    rows = (tokens > 0).sum()
    match mode:
        case "token-mean":
            return torch.ones_like(mask) / mask.sum()
        case "seq-mean-token-mean":
            return torch.where(tokens > 0, 1 / tokens.clamp(min=1), torch.zeros_like(tokens)).expand_as(mask) / rows
        case "seq-mean-token-sum":
            return torch.ones_like(mask) / rows
        case _:
            raise AssertionError(mode)


@pytest.mark.parametrize("case", GOLDEN["losses"]["cases"], ids=lambda case: f"{case['clip']}-{case['mode']}")
def test_policy_loss_equals_verl(case: dict[str, Any]) -> None:
    batch = GOLDEN["losses"]
    leaf = torch.tensor(batch["logprob"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(batch["mask"], dtype=torch.float64)
    result = policy_loss(
        leaf,
        torch.tensor(batch["old_logprob"], dtype=torch.float64),
        torch.tensor(batch["advantage"], dtype=torch.float64)[:, None].expand_as(leaf),
        mask,
        weight=golden_weights(case["mode"], mask),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        clip_dual=case["clip_dual"],
    )
    assert result.loss.item() == pytest.approx(case["loss"], abs=1e-6)
    result.loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-6, rtol=0)
    assert float(result.clipped.sum() / mask.sum()) == pytest.approx(case["clip_fraction"], abs=1e-6)
    assert float(result.dual_clipped.sum() / mask.sum()) == pytest.approx(case["dual_clip_fraction"], abs=1e-6)


def test_token_weights_are_verls_aggregation(make_sample: Callable[..., Sample]) -> None:
    """One sample a rollout: our token_mean and rollout_mean are veRL's token-mean and seq-mean-token-mean."""
    samples = [
        make_sample("a", range(9), [(1, 5)]),
        make_sample("b", range(9), [(3, 4)]),
        make_sample("c", range(9), []),
        make_sample("d", range(9), [(1, 3), (4, 8)]),
    ]
    mask = torch.zeros(4, 6, dtype=torch.float64)
    for number, tokens in enumerate((4, 1, 0, 6)):
        mask[number, :tokens] = 1
    for ours, theirs in (("token_mean", "token-mean"), ("rollout_mean", "seq-mean-token-mean")):
        expected = golden_weights(theirs, mask)[:, 0].tolist()
        got = token_weights(samples, ours)
        assert [got[0], got[1], got[3]] == pytest.approx([expected[0], expected[1], expected[3]])


def test_advantages_by_hand() -> None:
    # mean 2, squared deviations 4 + 0 + 4 = 8 over G - 1 = 2: deviation 2
    assert group_advantages([0.0, 2.0, 4.0], eps=0.0).values == (-1.0, 0.0, 1.0)
    assert group_advantages([0.0, 2.0, 4.0], normalise_std=False).values == (-2.0, 0.0, 2.0)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [0.0] * 8])
def test_equal_rewards_teach_nothing(rewards: list[float]) -> None:
    result = group_advantages(rewards)
    assert result.degenerate
    assert result.values == (0.0,) * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad])


def token_loss(logprob: float, old: float, advantage: float) -> tuple[float, float]:
    """Loss and d loss / d logprob of one token."""
    leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    result = policy_loss(
        leaf,
        torch.tensor([old], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        weight=torch.ones(1, dtype=torch.float64),
    )
    result.loss.backward()
    assert leaf.grad is not None
    return result.loss.item(), leaf.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, gradient -A
        (1.27, 1.0, -1.27, -1.27),  # inside clip-higher
        (1.5, 1.0, -1.28, 0.0),  # clipped above at 1.28, not 1.2
        (0.5, 1.0, -0.5, -0.5),  # a good token that got rarer keeps its gradient
        (0.5, -1.0, 0.8, 0.0),  # clipped below at 0.8
        (1.5, -1.0, 1.5, 1.5),  # a bad token that got likelier keeps its gradient
        (5.0, -1.0, 3.0, 0.0),  # dual clip at 3
    ],
)
def test_one_token(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got_loss, got_gradient = token_loss(math.log(ratio) - 2.0, -2.0, advantage)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient, abs=1e-12)


def test_masked_tokens_count_nowhere_even_when_not_finite() -> None:
    leaf = torch.tensor([-1.0, math.nan], requires_grad=True)
    result = policy_loss(
        leaf,
        torch.tensor([-1.0, -1.0]),
        torch.tensor([2.0, 2.0]),
        torch.tensor([1, 0]),
        weight=torch.tensor([0.5, 0.5]),
    )
    assert result.loss.item() == -1.0


def test_weights_by_hand(make_sample: Callable[..., Sample]) -> None:
    samples = [
        make_sample("s1", range(9), [(1, 3)], rollout="r1", group="g1"),  # 2 tokens
        make_sample("s2", range(9), [(1, 7)], rollout="r1", group="g1"),  # 6 tokens, same rollout
        make_sample("s3", range(9), [(1, 5)], rollout="r2", group="g1"),  # 4 tokens
        make_sample("s4", range(9), [(1, 3)], rollout="r3", group="g2"),  # 2 tokens
        make_sample("s5", range(9), [], masked=[(1, 3)], rollout="r4", group="g3"),  # none
    ]
    assert token_weights(samples, "token_mean")[:4] == [1 / 14] * 4
    # three rollouts count; r1 shares a third over 8 tokens
    assert token_weights(samples, "rollout_mean") == pytest.approx([1 / 24, 1 / 24, 1 / 12, 1 / 6, 0])
    # two groups count; g1 shares a half over 12 tokens
    assert token_weights(samples, "prompt_mean") == pytest.approx([1 / 24, 1 / 24, 1 / 24, 1 / 4, 0])


def test_a_samples_weight_acts_inside_its_share(make_sample: Callable[..., Sample]) -> None:
    samples = [
        make_sample("s1", range(9), [(1, 3)], rollout="r1", weight=3.0),
        make_sample("s2", range(9), [(1, 3)], rollout="r1", weight=1.0),
        make_sample("s3", range(9), [(1, 3)], rollout="r2", weight=5.0),
    ]
    # r1: 3·2 + 1·2 = 8, half of the loss; r2 alone has the other half whatever its weight
    assert token_weights(samples, "rollout_mean") == pytest.approx([3 / 16, 1 / 16, 1 / 4])
    with pytest.raises(InputError, match="sample s1: weight"):
        token_weights([make_sample("s1", range(9), [(1, 3)], weight=-1.0)], "token_mean")


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=12),
    aggregation=st.sampled_from(["token_mean", "rollout_mean", "prompt_mean"]),
)
def test_no_share_outweighs_another_however_many_rows_it_has(
    rows: list[tuple[int, int]], aggregation: Aggregation
) -> None:
    """Rows of six rollouts in two groups: all weight is given out, and every share that trains gets the same."""
    samples = [
        sample(f"s{n}", range(9), [(1, 1 + tokens)] if tokens else [], rollout=f"r{number}", group=f"g{number // 3}")
        for n, (number, tokens) in enumerate(rows)
    ]
    shares: dict[str, float] = defaultdict(float)
    for one, weight in zip(samples, token_weights(samples, aggregation), strict=True):
        if one.trained_tokens:
            key = {"token_mean": one.sample_id, "rollout_mean": one.rollout_id, "prompt_mean": one.group_id}[
                aggregation
            ]
            shares[key] += weight * one.trained_tokens
    if not shares:
        return
    assert math.fsum(shares.values()) == pytest.approx(1.0)
    if aggregation != "token_mean":
        assert list(shares.values()) == pytest.approx([1 / len(shares)] * len(shares))
