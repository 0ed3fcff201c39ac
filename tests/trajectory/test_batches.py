"""A batch's account holds every sampled token once; what is too old is masked, once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import ExactnessError
from openforgerl.trajectory import SamplePolicy, batch_totals, mask_stale
from openforgerl.types import Sample, SampleSet, Totals, WeightsSpan

from .test_samples import SEEDS, SESSIONS, samples_of
from .world import World, play


def mixed() -> tuple[SampleSet, int]:
    """One call whose first token version 1 sampled and the others version 2; how many tokens it has."""
    (call,) = play(5, []).calls
    length = len(call.sampled_ids)
    spans = (WeightsSpan(start=0, stop=1, version=1), WeightsSpan(start=1, stop=length, version=2))
    return samples_of([msgspec.structs.replace(call, weights_spans=spans)]), length


def states(samples: tuple[Sample, ...]) -> list[tuple[int, str | None]]:
    return [(span.weights_version, span.reason) for sample in samples for span in sample.spans]


@pytest.mark.parametrize(
    ("version", "limit", "expected"),
    [
        (2, 1, [(1, None), (2, None)]),  # one version back is allowed
        (2, 0, [(1, "stale"), (2, None)]),
        (3, 1, [(1, "stale"), (2, None)]),
        (4, 1, [(1, "stale"), (2, "stale")]),
        (9, None, [(1, None), (2, None)]),
    ],
)
def test_tokens_are_masked_by_the_version_that_sampled_each(
    version: int, limit: int | None, expected: list[tuple[int, str | None]]
) -> None:
    found, _ = mixed()
    masked = mask_stale(found.samples, version, limit)
    assert states(masked) == expected
    assert mask_stale(masked, version, limit) == masked  # a second time adds nothing
    assert [(sample.ids, sample.logprobs) for sample in masked] == [(s.ids, s.logprobs) for s in found.samples]


def test_what_is_masked_already_keeps_its_reason() -> None:
    """An attempt is masked against the version at its end, its batch against the trainer's: each token counts once."""
    world = play(3, [World.title])
    policy = SamplePolicy(max_staleness=1)
    early = samples_of(world.calls, policy, weights_version=2)  # all were sampled by version 1
    late = mask_stale(early.samples, 3, policy.max_staleness)
    asides = len(world.calls[-1].sampled_ids)
    totals = batch_totals({"a": early.totals}, late, trained=0)
    assert totals.masked == {"role:side": asides, "stale": early.totals.sampled - asides}


@settings(max_examples=60, deadline=None)
@given(seeds=st.lists(st.tuples(SEEDS, SESSIONS), min_size=1, max_size=3), version=st.integers(1, 4))
def test_a_batch_accounts_for_every_token_of_any_sessions(seeds: list[tuple[int, list[object]]], version: int) -> None:
    found = {
        f"a{number}": samples_of(play(seed, deeds).calls)  # type: ignore[arg-type]
        for number, (seed, deeds) in enumerate(seeds)
    }
    rows = [
        msgspec.structs.replace(sample, attempt_id=name)
        for name, samples in found.items()
        for sample in mask_stale(samples.samples, version, 2)
    ]
    trained = sum(sample.trained_tokens for sample in rows)
    totals = batch_totals({name: samples.totals for name, samples in found.items()}, rows, trained=trained)
    assert totals.sampled == sum(samples.totals.sampled for samples in found.values())
    assert totals.trained == trained
    assert ("stale" in totals.masked) == (version > 3)
    if trained:
        with pytest.raises(ExactnessError, match="does not add up"):
            batch_totals({name: samples.totals for name, samples in found.items()}, rows, trained=trained - 1)


def test_skipped_groups_and_foreign_rows() -> None:
    found, length = mixed()
    attempts = {"a": found.totals}
    totals = batch_totals(attempts, found.samples, trained=0, skipped=length)
    assert totals == Totals(sampled=length, trained=0, masked={"nothing_to_compare": length})
    with pytest.raises(ExactnessError, match="attempt a is not of this batch"):
        batch_totals({"b": found.totals}, found.samples, trained=length)
    # An attempt whose rows never reached the trainer is seen.
    with pytest.raises(ExactnessError, match="does not add up"):
        batch_totals({"a": found.totals, "b": found.totals}, found.samples, trained=length)
