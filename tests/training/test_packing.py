"""Packed equals row by row: layout, attention, log-probs and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from openforgerl.errors import InputError
from openforgerl.training import learner as learner_module
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy, Likelihood
from openforgerl.training.options import LearnerOptions
from openforgerl.training.packing import Pack, Row, Segment, common_length, pack, plan_micro_batches, row_of
from openforgerl.training.prefix_attention import tree_attention, tree_mask
from openforgerl.types import PlacedImage, Sample


def row(name: str, ids: list[int], places: list[int]) -> Row:
    return Row(name, tuple(ids), tuple(places), (0.0,) * len(places), 1.0, 1.0)


def seen_ids(packed_segments: tuple[Segment, ...], ids: list[int], at: int) -> list[int]:
    """The ids that packed place `at` attends to, by the mask."""
    mask = tree_mask(packed_segments, len(ids), torch.device("cpu"))
    return [ids[index] for index in mask[at].nonzero()[:, 0].tolist()]


def test_a_shared_prefix_stands_once() -> None:
    rows = [row("a", [1, 2, 3, 4, 5], [3, 4]), row("b", [1, 2, 3, 7], [3]), row("c", [1, 2, 3, 4, 6, 8], [5])]
    made = pack(rows, min_shared=1)
    # 1 2 3 once; below it [4 -> (5), (6 8)] and [7]
    assert made.ids_N.tolist() == [1, 2, 3, 4, 5, 6, 8, 7]
    assert made.position_N.tolist() == [0, 1, 2, 3, 4, 4, 5, 3]
    assert made.segments == (
        Segment(0, 3, 8),
        Segment(3, 4, 7),
        Segment(4, 5, 5),
        Segment(5, 7, 7),
        Segment(7, 8, 8),
    )
    assert made.target_L.tolist() == [4, 5, 7, 8]
    assert made.at_L.tolist() == [2, 3, 2, 5]
    assert made.row_L.tolist() == [0, 0, 1, 2]


def test_short_shared_stretches_are_not_worth_a_segment() -> None:
    rows = [row("a", [1, 2, 3, 4, 5], [4]), row("b", [1, 2, 3, 4, 6], [4]), row("c", [1, 2, 3, 9], [3])]
    made = pack(rows, min_shared=3)
    # a and b share one id (4) below the prefix of three: less than 3, so it stands twice
    assert made.ids_N.tolist() == [1, 2, 3, 4, 5, 4, 6, 9]
    apart = pack(rows, min_shared=4)
    # at the top a and b share four, c only three of them: c stands alone
    assert apart.ids_N.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 9]


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=9), min_size=1, max_size=7),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_every_loss_token_sees_exactly_its_row(id_rows: list[list[int]], min_shared: int) -> None:
    rows = [row(f"r{number}", ids, list(range(1, len(ids)))) for number, ids in enumerate(id_rows)]
    made = pack(rows, min_shared=min_shared)
    ids = made.ids_N.tolist()
    entries = zip(made.row_L.tolist(), made.at_L.tolist(), made.target_L.tolist(), strict=True)
    expected = [(number, place) for number, each in enumerate(id_rows) for place in range(1, len(each))]
    for (number, place), (row_index, at, target) in zip(expected, entries, strict=True):
        assert row_index == number
        assert target == id_rows[number][place]
        assert seen_ids(made.segments, ids, at) == id_rows[number][:place]
        assert made.position_N[at] == place - 1
    assert len(ids) <= sum(map(len, id_rows))


@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=9),
    st.integers(1, 30),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_micro_batches_keep_the_budget_and_lose_no_row(id_rows: list[list[int]], budget: int, min_shared: int) -> None:
    rows = [row(f"r{number}", ids, [0] if number % 3 else []) for number, ids in enumerate(id_rows)]
    batches = plan_micro_batches(rows, budget=budget, min_shared=min_shared)
    assert sorted(each.sample_id for batch in batches for each in batch) == sorted(
        each.sample_id for each in rows if each.places
    )
    for batch in batches:
        bare = [Row(each.sample_id, each.ids, (), (), 0.0, 1.0) for each in batch]
        assert len(batch) == 1 or len(pack(bare, min_shared=min_shared).ids_N) <= budget
    backwards = plan_micro_batches(rows[::-1], budget=budget, min_shared=min_shared)
    assert backwards == batches


def test_common_length() -> None:
    assert common_length((), (1,)) == 0
    assert common_length((1, 2, 3), (1, 2, 3)) == 3
    assert common_length((1, 2), (1, 2, 3)) == 2
    assert common_length((4, 2, 3), (1, 2, 3)) == 0
    long = tuple(range(1000))
    assert common_length((*long[:700], -1, *long[701:]), long) == 700


def test_a_sample_that_cannot_be_trained_is_named(make_sample: Callable[..., Sample]) -> None:
    with pytest.raises(InputError, match="sample s1: its first id"):
        row_of(make_sample("s1", [1, 2], [(0, 1)]), 1.0, needs_logprobs=False)
    with pytest.raises(InputError, match="sample s2: RL needs logprobs and advantage"):
        row_of(make_sample("s2", [1, 2], [(1, 2)]), 1.0, needs_logprobs=True)
    with pytest.raises(InputError, match="sample s3: RL needs advantage"):
        row_of(make_sample("s3", [1, 2], [(1, 2)], logprobs=[-1.0]), 1.0, needs_logprobs=True)
    image = PlacedImage(sha256="0" * 64, start=0, count=1, grid=(1, 2, 2))
    pictured = Sample(
        sample_id="s4", attempt_id="", rollout_id="", group_id="", ids=(1, 2), spans=(), logprobs=None,
        source="policy", images=(image,),
    )  # fmt: skip
    with pytest.raises(InputError, match="sample s4: images"):
        row_of(pictured, 1.0, needs_logprobs=False)


def test_log_probs_follow_their_tokens_past_masked_spans(make_sample: Callable[..., Sample]) -> None:
    mixed = make_sample(
        "s", range(10), [(2, 4), (7, 8)], masked=[(5, 7)], logprobs=[-0.1, -0.2, -9.0, -9.0, -0.3], advantage=1.0
    )
    made = row_of(mixed, 0.5, needs_logprobs=True)
    assert made.places == (2, 3, 7)
    assert made.old_logprobs == (-0.1, -0.2, -0.3)


TREE = (Segment(0, 4, 12), Segment(4, 6, 9), Segment(6, 8, 8), Segment(8, 9, 9), Segment(9, 12, 12))


def test_tree_attention_is_masked_attention() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 3, 12, 8, requires_grad=True) for _ in range(3))
    direction = torch.randn(1, 3, 12, 8)
    mine = tree_attention(query, key, value, TREE, scale=0.4)
    gradients = torch.autograd.grad((mine * direction).sum(), (query, key, value))
    mask = tree_mask(TREE, 12, torch.device("cpu"))
    plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4)
    expected = torch.autograd.grad((plain * direction).sum(), (query, key, value))
    torch.testing.assert_close(mine, plain, atol=1e-6, rtol=0)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_tree_attention_gradient_by_finite_differences() -> None:
    torch.manual_seed(1)
    inputs = tuple(torch.randn(1, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: tree_attention(q, k, v, TREE, scale=0.5), inputs)


def test_tree_attention_survives_large_scores() -> None:
    query = torch.full((1, 1, 12, 4), 40.0)
    value = torch.arange(12.0).reshape(1, 1, 12, 1).expand(1, 1, 12, 4)
    out = tree_attention(query, query, value, TREE, scale=1.0)  # every score is 6400: uniform attention
    # places 6, 7 see 0-5 and themselves; 9 sees 0-3 and itself. A log-sum-exp near 6400 has a step of 5e-4 in
    # fp32, so the merge weights are right to about that.
    assert out[0, 0, 7, 0].item() == pytest.approx(sum(range(8)) / 8, rel=1e-3)
    assert out[0, 0, 9, 0].item() == pytest.approx((0 + 1 + 2 + 3 + 9) / 5, rel=1e-3)


def random_samples(make_sample: Callable[..., Sample], seed: int, *, prefix: int, rows: int) -> list[Sample]:
    """Rows with one long prefix, groups with a longer one, random trained stretches, some equal rows."""
    rng = random.Random(seed)
    common = [rng.randrange(2, 60) for _ in range(prefix)]
    made: list[Sample] = []
    for number in range(rows):
        group = number % 3
        ids = common + [50 + group] * (3 * group) + [rng.randrange(2, 60) for _ in range(rng.randrange(2, 14))]
        if number == rows - 1 and made:
            ids = list(made[0].ids)
        start = rng.randrange(max(1, prefix - 3), len(ids) - 1)
        cut = rng.randrange(start + 1, len(ids))
        trained = [(start, cut), (cut, len(ids))] if rng.random() < 0.5 else [(start, len(ids))]
        made.append(
            make_sample(
                f"s{number}",
                ids,
                trained,
                logprobs=[-rng.random() * 5 for _ in range(len(ids) - start)],
                rollout=f"r{number // 2}",
                group=f"g{group}",
                advantage=rng.gauss(0, 1),
            )
        )
    return made


def plain_gradients(model: torch.nn.Module, samples: list[Sample], objective: str) -> dict[str, torch.Tensor]:
    """Row by row through the model's own SDPA attention, losses written out here."""
    model.set_attn_implementation("sdpa")  # pyright: ignore
    model.zero_grad()
    rollouts: dict[str, int] = {}
    for each in samples:
        rollouts[each.rollout_id] = rollouts.get(each.rollout_id, 0) + each.trained_tokens
    total = sum(each.trained_tokens for each in samples)
    for each in samples:
        logits = model(input_ids=torch.tensor([each.ids])).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        at = 0
        for span in each.spans:
            for place in range(span.start, span.stop):
                logprob = logprobs[place - 1, each.ids[place]]
                if objective == "likelihood":
                    loss = -logprob / total
                else:
                    assert each.logprobs is not None
                    assert each.advantage is not None
                    ratio = torch.exp(logprob - each.logprobs[at])
                    gain = torch.minimum(ratio * each.advantage, ratio.clamp(0.8, 1.28) * each.advantage)
                    if each.advantage < 0:
                        gain = torch.maximum(gain, torch.tensor(3 * each.advantage))
                    loss = -gain / (len(rollouts) * rollouts[each.rollout_id])
                at += 1
                loss.backward(retain_graph=True)
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("budget", [10_000, 60, 1])
@pytest.mark.parametrize("kind", ["likelihood", "policy"])
def test_packed_gradients_equal_row_by_row(
    make_model: Callable[..., torch.nn.Module], make_sample: Callable[..., Sample], kind: str, budget: int
) -> None:
    samples = random_samples(make_sample, seed=budget, prefix=20, rows=8)
    expected = plain_gradients(make_model(3), samples, kind)
    learner = Learner(make_model(3), LearnerOptions(micro_batch_tokens=budget, min_shared_tokens=3))
    objective = Likelihood() if kind == "likelihood" else ClippedPolicy()
    got = learner.gradients(samples, objective)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert max(float(want.abs().max()) for want in expected.values()) > 1e-2  # the comparison is not one of zeros


@pytest.mark.parametrize("seed", range(12))
def test_packed_equals_rows_for_random_trees(
    make_model: Callable[..., torch.nn.Module], make_sample: Callable[..., Sample], seed: int
) -> None:
    rng = random.Random(seed)
    samples = random_samples(make_sample, seed, prefix=rng.randrange(1, 40), rows=rng.randrange(1, 7))
    expected = plain_gradients(make_model(seed), samples, "policy")
    options = LearnerOptions(micro_batch_tokens=rng.randrange(1, 120), min_shared_tokens=rng.randrange(1, 10))
    got = Learner(make_model(seed), options).gradients(samples, ClippedPolicy())
    for name, want in expected.items():
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-5)


def shift_predictions(made: Pack) -> Pack:
    return replace(made, at_L=(made.at_L - 1).clamp(min=0))


def restart_positions(made: Pack) -> Pack:
    first = made.segments[1].start
    return replace(made, position_N=torch.cat([made.position_N[:first], made.position_N[first:] - 1]))


def hide_an_ancestor(made: Pack) -> Pack:
    root = made.segments[0]
    return replace(made, segments=(replace(root, end=root.stop), *made.segments[1:]))


def leak_into_a_neighbour(made: Pack) -> Pack:
    inner = next(index for index, segment in enumerate(made.segments[1:], 1) if segment.end < len(made.ids_N))
    longer = replace(made.segments[inner], end=made.segments[inner].end + 1)
    return replace(made, segments=(*made.segments[:inner], longer, *made.segments[inner + 1 :]))


def swap_two_ids(made: Pack) -> Pack:
    ids = made.ids_N.clone()
    ids[[1, 2]] = ids[[2, 1]]
    return replace(made, ids_N=ids)


@pytest.mark.parametrize(
    "fault", [shift_predictions, restart_positions, hide_an_ancestor, leak_into_a_neighbour, swap_two_ids]
)
def test_a_planted_fault_is_seen(
    make_model: Callable[..., torch.nn.Module],
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Pack], Pack],
) -> None:
    """The comparison with row-by-row gradients is sharp enough to catch each way of packing wrongly."""
    samples = random_samples(make_sample, seed=1, prefix=20, rows=8)
    expected = plain_gradients(make_model(3), samples, "likelihood")
    monkeypatch.setattr(learner_module, "pack", lambda *args, **kwargs: fault(pack(*args, **kwargs)))
    got = Learner(make_model(3), LearnerOptions(min_shared_tokens=3)).gradients(samples, Likelihood())
    assert max(float((got[name] - want).abs().max()) for name, want in expected.items()) > 1e-3


def test_another_architecture_trains_packed(make_sample: Callable[..., Sample]) -> None:
    def llama() -> LlamaForCausalLM:
        torch.manual_seed(5)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
                num_key_value_heads=3, max_position_embeddings=128, initializer_range=0.15,
            )
        ).eval()  # fmt: skip

    samples = random_samples(make_sample, seed=9, prefix=12, rows=5)
    expected = plain_gradients(llama(), samples, "likelihood")
    got = Learner(llama(), LearnerOptions(min_shared_tokens=2)).gradients(samples, Likelihood())
    for name, want in expected.items():
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-5)


def test_a_model_with_a_short_sliding_window_is_refused(
    make_model: Callable[..., torch.nn.Module], make_sample: Callable[..., Sample]
) -> None:
    model = make_model(0, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    learner = Learner(model, LearnerOptions())  # pyright: ignore
    with pytest.raises(InputError, match="sliding_window 8 is shorter than a row"):
        learner.evaluate([make_sample("s", range(2, 20), [(4, 18)])])
    learner.evaluate([make_sample("s", range(2, 10), [(4, 8)])])  # within the window it is ordinary attention
