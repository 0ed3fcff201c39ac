"""Optimizer updates: exact under every cut, deterministic, and without effect when something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from openforgerl.errors import InputError, TrainingError
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy, Likelihood
from openforgerl.training.optimizers import Muon, build_optimizers, learning_rate, orthogonalise
from openforgerl.training.options import LearnerOptions, OptimizerOptions
from openforgerl.types import Sample

MakeSample = Callable[..., Sample]
MakeModel = Callable[..., Any]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def recorded(learner: Learner, ids: list[int], start: int) -> list[float]:
    """Log-probs of ids[start:] by the model's own ordinary forward pass."""
    learner.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logprobs = torch.log_softmax(learner.model(input_ids=torch.tensor([ids])).logits[0], -1)
    learner.model.set_attn_implementation("openforgerl_prefix_tree")
    return [float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids))]


def policy_samples(learner: Learner, make_sample: MakeSample) -> list[Sample]:
    rows = [[5, 6, 7, 8, 9, 10 + n, 11, 12 + n % 2, 13] for n in range(6)]
    return [
        make_sample(f"s{n}", ids, [(4, 9)], logprobs=recorded(learner, ids, 4), rollout=f"r{n}", advantage=(-1.0) ** n)
        for n, ids in enumerate(rows)
    ]


def test_on_policy_statistics(make_model: MakeModel, make_sample: MakeSample) -> None:
    learner = Learner(make_model(), LearnerOptions(min_shared_tokens=2))
    samples = [*policy_samples(learner, make_sample), make_sample("m", [1, 2, 3], [], masked=[(1, 3)])]
    metrics = learner.step(samples, ClippedPolicy())
    assert metrics.updated
    assert metrics.update == 1
    assert metrics.loss == pytest.approx(0.0, abs=1e-6)  # ratio 1: loss is minus the mean advantage, here zero
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-5)
    assert metrics.logprob_difference_max is not None
    assert metrics.logprob_difference_max < 1e-5
    assert metrics.clip_fraction == 0
    assert (metrics.samples, metrics.tokens_trained, metrics.tokens_masked) == (7, 30, 2)
    # 6 rows of 9; shared: 5 once, then 4 each (10 + n differs at once)
    assert (metrics.tokens_in_rows, metrics.tokens_computed) == (54, 5 + 6 * 4)
    assert 0 < metrics.entropy < math.log(61)
    assert metrics.grad_norm > 0
    second = learner.step(samples, ClippedPolicy())
    assert second.update == 2
    assert second.logprob_difference_max is not None
    assert second.logprob_difference_max > 1e-4  # the weights have moved


def test_temperature_divides_the_logits(make_model: MakeModel, make_sample: MakeSample) -> None:
    ids = [5, 6, 7, 8]
    model = make_model()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    at_two = float(torch.log_softmax(logits[2] / 2, -1)[8])
    learner = Learner(model, LearnerOptions(temperature=2.0))
    made = make_sample("s", ids, [(3, 4)], logprobs=[at_two], advantage=1.0)
    assert learner.step([made], ClippedPolicy()).logprob_difference_max == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_micro_batches_and_order_do_not_change_the_update(
    make_model: MakeModel, make_sample: MakeSample, kind: Any
) -> None:
    def run(budget: int, reverse: bool) -> tuple[dict[str, torch.Tensor], Any]:
        options = LearnerOptions(
            micro_batch_tokens=budget, min_shared_tokens=2, optimizer=OptimizerOptions(kind=kind, lr=1e-3)
        )
        learner = Learner(make_model(), options)
        samples = policy_samples(learner, make_sample)
        metrics = [learner.step(samples[::-1] if reverse else samples, ClippedPolicy()) for _ in range(2)]
        return weights(learner), metrics[-1]

    whole, metrics = run(10_000, reverse=False)
    backwards, _ = run(10_000, reverse=True)
    assert same(whole, backwards)  # bit by bit
    cut, cut_metrics = run(12, reverse=False)
    assert (metrics.micro_batches, cut_metrics.micro_batches) == (1, 6)
    assert cut_metrics.loss == pytest.approx(metrics.loss, abs=1e-6)
    assert cut_metrics.grad_norm == pytest.approx(metrics.grad_norm, rel=1e-4)
    if kind == "muon":  # AdamW's first steps are signs of the gradient: rounding noise decides tiny entries
        for name, want in whole.items():
            torch.testing.assert_close(cut[name], want, atol=2e-5, rtol=1e-3)


def test_a_batch_without_trained_tokens_changes_nothing(make_model: MakeModel, make_sample: MakeSample) -> None:
    learner = Learner(make_model(), LearnerOptions())
    before = weights(learner)
    metrics = learner.step([make_sample("s", [1, 2, 3], [], masked=[(1, 3)])], ClippedPolicy())
    assert not metrics.updated
    assert (metrics.update, metrics.tokens_masked) == (0, 2)
    assert same(weights(learner), before)


def test_a_log_prob_that_is_not_finite_names_the_sample(make_model: MakeModel, make_sample: MakeSample) -> None:
    learner = Learner(make_model(tie_word_embeddings=False), LearnerOptions(min_shared_tokens=1))
    with torch.no_grad():
        learner.model.get_input_embeddings().weight[33] = math.nan  # only rows with id 33 in their context break
    good = make_sample("good", [2, 3, 4, 5], [(2, 4)])
    bad = make_sample("bad", [2, 3, 33, 5], [(3, 4)])
    before = weights(learner)
    with pytest.raises(TrainingError, match="sample bad is not finite; no update"):
        learner.step([good, bad], Likelihood())
    after = weights(learner)
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    assert learner.updates == 0
    assert all(param.grad is None for param in learner.model.parameters())
    assert learner.step([good], Likelihood()).updated


def test_a_gradient_that_is_not_finite_names_the_sample(make_model: MakeModel, make_sample: MakeSample) -> None:
    learner = Learner(make_model(), LearnerOptions())
    good = make_sample("good", [2, 3, 4, 5], [(2, 4)], logprobs=[-3.0, -3.0], advantage=1.0)
    # ratio e^20 and |advantage| 3e38: the loss of a rarer good token is finite, its gradient overflows
    ratio_one = recorded(learner, [2, 3, 9, 8], 2)
    bad = make_sample("bad", [2, 3, 9, 8], [(2, 4)], logprobs=ratio_one, advantage=3e38)
    before = weights(learner)
    with pytest.raises(TrainingError, match="sample bad"):
        learner.step([good, bad], ClippedPolicy(aggregation="token_mean"))
    assert same(weights(learner), before)
    assert learner.updates == 0
    assert not any(optimizer.state_dict()["state"] for optimizer in learner.optimizers)


def test_an_empty_directory_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        Learner(tmp_path, LearnerOptions())


def test_likelihood_training_fits(make_model: MakeModel, make_sample: MakeSample) -> None:
    learner = Learner(make_model(), LearnerOptions(optimizer=OptimizerOptions(kind="muon", lr=5e-3, warmup_steps=0)))
    samples = [make_sample(f"s{n}", [3, 4, 5 + n, 20 + n, 30 + n], [(3, 5)]) for n in range(4)]
    start = learner.evaluate(samples)
    assert start.tokens == 8
    for _ in range(40):
        learner.step(samples, Likelihood())
    end = learner.evaluate(samples)
    assert end.loss < 0.1 * start.loss
    assert end.accuracy == 1.0
    with pytest.raises(InputError, match="nothing to evaluate"):
        learner.evaluate([make_sample("s", [1, 2], [])])


def test_orthogonalise_makes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    made = orthogonalise(torch.randn(3, 8, 20))
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_by_hand() -> None:
    """A one-row gradient: its nearest semi-orthogonal matrix is its direction."""
    parameter = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.5)
    parameter.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    # decay: times 1 - 0.1·0.5; update 0.1 · 0.2 · sqrt(2) along (0.6, 0.8) times what five rounds of the quintic
    # make of a singular value of 1: 0.701, 1.1135, 0.7206, 1.0900, 0.6965
    moved = parameter.detach() - 0.95 * torch.tensor([[1.0, 2.0]])
    length = float(moved.norm())
    assert length == pytest.approx(0.6965 * 0.1 * 0.2 * 2**0.5, rel=1e-3)
    torch.testing.assert_close(moved / length, torch.tensor([[-0.6, -0.8]]), atol=1e-5, rtol=0)


def test_every_weight_has_one_optimizer(make_model: MakeModel) -> None:
    for tied in (True, False):
        model = make_model(tie_word_embeddings=tied)
        muon, adamw = build_optimizers(model, OptimizerOptions(kind="muon"))
        owned = [id(p) for o in (muon, adamw) for group in o.param_groups for p in group["params"]]
        assert sorted(owned) == sorted(id(p) for p in model.parameters())
        in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
        names = {name for name, p in model.named_parameters() if id(p) in in_muon}
        assert names == {name for name, _ in model.named_parameters() if "_proj" in name}


def test_learning_rate_by_hand() -> None:
    options = OptimizerOptions(lr=1.0, warmup_steps=4, decay="linear", decay_start=0.5, final_lr_ratio=0.1)
    rates = [learning_rate(options, step, 11) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:6] == [1.0, 1.0]
    # from 5.5 (half of 11) to 10 (the last): step 10 is at 0.1, step 6 at 1 - 0.9 · 0.5/4.5
    assert rates[6] == pytest.approx(0.9)
    assert rates[10] == pytest.approx(0.1)
    assert learning_rate(options, 50, None) == 1.0
