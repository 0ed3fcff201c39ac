"""Images of one size have the same ids, so the ids alone do not say what the model saw."""

from __future__ import annotations

import msgspec
import pytest

from openforgerl.errors import ExactnessError
from openforgerl.trajectory import SamplePolicy, audit_attempt, build, build_samples
from openforgerl.trajectory.samples import check_exact
from openforgerl.trajectory.tree import carried
from openforgerl.types import ModelCall, PlacedImage, Rollout, SampleSet, Source

from .world import World

ROLLOUT = Rollout(
    rollout_id="r", run_id="run", task="t", task_digest="d", harness="h", group_id="g", index=0, seed=0, purpose="train"
)


def looking(call: ModelCall, sha256: str, start: int = 1) -> ModelCall:
    image = PlacedImage(sha256=sha256, start=start, count=1, grid=(1, 2, 2))
    return msgspec.structs.replace(call, prompt=msgspec.structs.replace(call.prompt, images=(image,)))


def samples_of(calls: list[ModelCall]) -> SampleSet:
    return build_samples(build("a", calls), rollout=ROLLOUT, source=Source.POLICY, policy=SamplePolicy())


def test_the_same_ids_about_another_image_are_no_retry() -> None:
    world = World(4)
    first, second = (world.finish(world.begin(world.agents[0])) for _ in range(2))
    assert first.prompt.ids == second.prompt.ids
    same = [looking(first, "aa"), looking(second, "aa")]
    assert samples_of(same).totals.dropped == {"retry": len(first.sampled_ids)}
    other = [looking(first, "aa"), looking(second, "bb")]
    found = samples_of(other)
    assert found.totals.dropped == {}
    assert [sample.images[0].sha256 for sample in found.samples] == ["aa", "bb"]
    assert audit_attempt(build("a", same), samples_of(same)).retries == 1
    audit = audit_attempt(build("a", other), found)
    assert (audit.retries, audit.findings) == (0, ())


def test_a_row_goes_on_only_with_the_images_that_its_calls_saw() -> None:
    world = World(4)
    world.turn(world.agents[0])
    world.turn(world.agents[0])
    first, second = world.calls
    assert carried(looking(first, "aa"), looking(second, "aa")) == carried(first, second) is not None
    assert carried(looking(first, "aa"), looking(second, "bb")) is None
    assert len(samples_of([looking(first, "aa"), looking(second, "aa")]).samples) == 1
    apart = [looking(first, "aa"), looking(second, "bb")]
    assert len(samples_of(apart).samples) == 2
    (found,) = audit_attempt(build("a", apart), samples_of(apart)).breaks
    assert found.call_id == second.call_id


def test_a_sample_with_another_image_than_its_call_saw_is_refused() -> None:
    world = World(4)
    call = looking(world.finish(world.begin(world.agents[0])), "aa")
    (sample,) = samples_of([call]).samples
    check_exact(sample, {call.call_id: call})
    image = msgspec.structs.replace(sample.images[0], sha256="bb")
    with pytest.raises(ExactnessError, match="is not what the engine saw"):
        check_exact(msgspec.structs.replace(sample, images=(image,)), {call.call_id: call})
