"""Nouns refuse what they must not hold."""

from __future__ import annotations

import math

import msgspec
import pytest

from openforgerl import types as t


def test_an_outcome_is_exactly_one_of_two_and_survives_json() -> None:
    verdict = t.Verdict(reward=0.5, passed=False)
    failure = t.Failure(stage=t.Stage.RUN, kind="crash", origin=t.Origin.HARNESS, message="exit 1", retryable=True)
    for outcome in (verdict, failure):
        assert msgspec.json.decode(msgspec.json.encode(outcome), type=t.Outcome) == outcome


@pytest.mark.parametrize("reward", [math.nan, math.inf, -0.1, 1.0000001])
def test_a_reward_is_finite_and_in_range(reward: float) -> None:
    with pytest.raises(ValueError, match="reward must be a finite number in"):
        t.Verdict(reward=reward, passed=False)


def test_only_the_models_failures_may_be_graded() -> None:
    assert [origin for origin in t.Origin if origin.ours] == [
        t.Origin.INFRASTRUCTURE,
        t.Origin.HARNESS,
        t.Origin.VERIFIER,
    ]


def test_conservation_is_checked_where_totals_are_made() -> None:
    t.Totals(sampled=10, trained=5, masked={"role:side": 3}, dropped={"aborted": 2})
    with pytest.raises(ValueError, match="10 tokens sampled but 9 accounted for"):
        t.Totals(sampled=10, trained=5, masked={"role:side": 2}, dropped={"aborted": 2})


def _span(start: int, stop: int) -> t.Span:
    return t.Span(start=start, stop=stop, call_id="c", offset=0, state="trained")


@pytest.mark.parametrize("spans", [(_span(0, 2), _span(1, 3)), (_span(2, 3), _span(0, 1)), (_span(3, 5),)])
def test_spans_are_ordered_disjoint_and_inside(spans: tuple[t.Span, ...]) -> None:
    with pytest.raises(ValueError, match="spans overlap"):
        t.Sample(
            sample_id="s",
            attempt_id="a",
            rollout_id="r",
            group_id="g",
            ids=(1, 2, 3, 4),
            spans=spans,
            logprobs=None,
            source=t.Source.POLICY,
        )


def test_logprobs_are_one_finite_float_per_span_token() -> None:
    row = {
        "sample_id": "s",
        "attempt_id": "a",
        "rollout_id": "r",
        "group_id": "g",
        "ids": (1, 2, 3),
        "spans": (_span(1, 3),),
        "source": t.Source.POLICY,
    }
    t.Sample(**row, logprobs=(-1.0, -2.0))
    with pytest.raises(ValueError, match="2 span tokens, 1 log-probs"):
        t.Sample(**row, logprobs=(-1.0,))
    with pytest.raises(ValueError, match="finite"):
        t.Sample(**row, logprobs=(-1.0, math.nan))


def test_prompt_origins_cover_every_id() -> None:
    span = t.OriginSpan(start=0, stop=2, kind="template")
    t.Prompt(ids=(1, 2), origins=(span,))
    with pytest.raises(ValueError, match="cover 2 of 3"):
        t.Prompt(ids=(1, 2, 3), origins=(span,))
    with pytest.raises(ValueError, match="gap or overlap"):
        t.Prompt(ids=(1, 2, 3), origins=(span, t.OriginSpan(start=1, stop=3, kind="data", message=0)))


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("top_p", 0), ("top_k", -1), ("max_tokens", 0), ("temperature", math.nan)]
)
def test_sampling_names_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        t.Sampling(**{field: value})


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (t.Sampling(), None),
        (t.Sampling(temperature=0.5), None),
        (t.Sampling(temperature=0), "greedy"),
        (t.Sampling(top_p=0.9), "truncation"),
        (t.Sampling(top_k=40), "truncation"),
        (t.Sampling(presence_penalty=0.1), "penalty"),
    ],
)
def test_truncated_sampling_is_off_policy(sampling: t.Sampling, reason: str | None) -> None:
    assert sampling.off_policy == reason


def test_a_chunk_with_missing_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ids but 1 logprobs"):
        t.Chunk(ids=(1, 2), logprobs=(-0.1,), weights_version=0)
