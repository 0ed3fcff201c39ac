"""For any tree of calls every sample is exactly what the engine saw and emitted, and every token is accounted for."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import ExactnessError, InputError
from openforgerl.trajectory import SamplePolicy, account, annotate, build, build_samples, check_exact
from openforgerl.types import (
    Branch,
    CallStatus,
    ModelCall,
    Rollout,
    Sample,
    SampleSet,
    Source,
    ThreadRole,
    WeightsSpan,
)

from .world import APPENDING, EDITING, END, World, play

ROLLOUT = Rollout(
    rollout_id="r",
    run_id="run",
    task="t",
    task_digest="d",
    harness="h",
    group_id="g",
    index=0,
    seed=1,
    purpose="train",
)
SEEDS = st.integers(0, 2**32)
SESSIONS = st.lists(st.sampled_from(APPENDING + EDITING), max_size=14)
POLICY = SamplePolicy()


def samples_of(calls: list[ModelCall], policy: SamplePolicy = POLICY, **rest: object) -> SampleSet:
    source = rest.pop("source", Source.POLICY)
    return build_samples(build("a", calls), rollout=ROLLOUT, source=source, policy=policy, **rest)  # type: ignore[arg-type]


def check_against_engine(world: World, samples: SampleSet) -> Counter[tuple[str, int]]:
    """Every span against the engine's own record; how often each sampled token lies in a span."""
    spans: Counter[tuple[str, int]] = Counter()
    for sample in samples.samples:
        at = 0
        assert sample.logprobs is not None
        for span in sample.spans:
            prompt, sampled, logprobs = world.engine[span.call_id]
            stop = span.offset + span.stop - span.start
            assert sample.ids[: span.stop] == prompt + sampled[:stop]
            assert sample.logprobs[at : at + span.stop - span.start] == logprobs[span.offset : stop]
            at += span.stop - span.start
            spans.update((span.call_id, offset) for offset in range(span.offset, stop))
    return spans


@settings(max_examples=300, deadline=None)
@given(seed=SEEDS, deeds=SESSIONS, strips=st.booleans())
def test_rows_are_what_the_engine_saw_and_every_token_is_counted_once(
    seed: int, deeds: list[object], strips: bool
) -> None:
    world = play(seed, deeds, strips=strips)  # type: ignore[arg-type]
    samples = samples_of(world.calls)
    spans = check_against_engine(world, samples)
    assert set(spans.values()) <= {1}

    trained = Counter((span.call_id, span.state, span.reason) for sample in samples.samples for span in sample.spans)
    for call in world.calls:
        fate, role = world.fates[call.call_id], world.roles[call.call_id]
        held = sum(1 for call_id, _ in spans if call_id == call.call_id)
        states = {(state, reason) for call_id, state, reason in trained if call_id == call.call_id}
        if fate != "counts":
            assert held == 0, (call.call_id, fate)
        elif role in (ThreadRole.SIDE, ThreadRole.UNATTRIBUTED):
            assert states == {("masked", f"role:{role.value}")}
        else:
            assert states <= {("trained", None)}
            # All of it, but for a stop token that the template's own closing replaced.
            assert held == len(call.sampled_ids) or (held == len(call.sampled_ids) - 1 and call.sampled_ids[-1] != END)

    totals = samples.totals
    assert totals.sampled == sum(len(sampled) for _, sampled, _ in world.engine.values())
    assert totals.trained + sum(totals.masked.values()) == len(spans)
    for reason in ("retry", "aborted", "error"):
        lost = sum(len(world.engine[call_id][1]) for call_id, fate in world.fates.items() if fate == reason)
        assert totals.dropped.get(reason, 0) == lost


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, deeds=st.lists(st.sampled_from(APPENDING), max_size=14))
def test_appending_conversations_are_one_row_each(seed: int, deeds: list[object]) -> None:
    world = play(seed, deeds)  # type: ignore[arg-type]
    assert len(samples_of(world.calls).samples) == len({call.thread for call in world.calls})


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, deeds=SESSIONS, strips=st.booleans(), order=st.randoms(use_true_random=False))
def test_the_order_in_which_calls_are_given_does_not_matter(
    seed: int, deeds: list[object], strips: bool, order: random.Random
) -> None:
    world = play(seed, deeds, strips=strips)  # type: ignore[arg-type]
    shuffled = list(world.calls)
    order.shuffle(shuffled)
    assert samples_of(shuffled) == samples_of(world.calls)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, deeds=SESSIONS, pick=st.integers(0, 10**6), fault=st.sampled_from(["swap", "shift", "offset"]))
def test_planted_faults_are_caught(seed: int, deeds: list[object], pick: int, fault: str) -> None:
    world = play(seed, [World.turn, World.turn, *deeds])  # type: ignore[list-item]
    calls = {call.call_id: call for call in world.calls}
    good = samples_of(world.calls).samples
    sample = good[pick % len(good)]
    check_exact(sample, calls)
    if not sample.spans:
        return
    span = sample.spans[pick % len(sample.spans)]
    ids, spans = list(sample.ids), list(sample.spans)
    where = spans.index(span)
    if fault == "swap":
        left = next(at for at in range(len(ids) - 1) if ids[at] != ids[at + 1])
        if left >= sample.spans[-1].stop:
            return
        ids[left], ids[left + 1] = ids[left + 1], ids[left]
    elif fault == "shift":
        spans[where] = msgspec.structs.replace(span, start=span.start - 1, stop=span.stop - 1)
    else:
        spans[where] = msgspec.structs.replace(span, offset=span.offset + 1)
    spans = spans[where : where + 1] if fault == "shift" else spans
    bad = Sample(
        **{name: getattr(sample, name) for name in sample.__struct_fields__}
        | {"ids": tuple(ids), "spans": tuple(spans), "logprobs": None if fault == "shift" else sample.logprobs}
    )
    with pytest.raises(ExactnessError):
        check_exact(bad, calls)


def test_a_wrong_logprob_is_caught() -> None:
    world = play(1, [World.turn])
    (sample,) = samples_of(world.calls).samples
    assert sample.logprobs is not None
    bad = msgspec.structs.replace(sample, logprobs=(sample.logprobs[1], sample.logprobs[0], *sample.logprobs[2:]))
    with pytest.raises(ExactnessError, match="log-probs"):
        check_exact(bad, {call.call_id: call for call in world.calls})


def test_a_token_in_two_spans_is_caught() -> None:
    world = play(1, [World.turn])
    (sample,) = samples_of(world.calls).samples
    with pytest.raises(ExactnessError, match="two spans"):
        account([sample, sample], world.calls, {})
    with pytest.raises(ExactnessError, match="does not add up"):
        account([], world.calls, {})


def test_branches_that_the_tokens_deny_are_caught() -> None:
    world = play(1, [World.title])
    trajectory = build("a", world.calls)
    forged = msgspec.structs.replace(trajectory, branches=(Branch(branch_id="x", thread="main", calls=("c0", "c1")),))
    with pytest.raises(ExactnessError, match="does not begin with"):
        build_samples(forged, rollout=ROLLOUT, source=Source.POLICY, policy=POLICY)
    with pytest.raises(ExactnessError, match="differ"):
        build_samples(
            msgspec.structs.replace(trajectory, branches=()), rollout=ROLLOUT, source=Source.POLICY, policy=POLICY
        )
    with pytest.raises(ExactnessError, match="occurs twice"):
        build("a", [world.calls[0], world.calls[0]])


def test_interleaving_changes_nothing_but_names() -> None:
    """The same three conversations, one after the other and mixed: the same rows."""

    def rows(order: str) -> set[tuple[object, ...]]:
        world = World(0, shuffle=False)
        agents = {"m": world.agents[0]}
        for name in "xy":
            agents[name] = world.agent(
                name, ThreadRole.SUBAGENT, "w3 w4", f"w9{ord(name)}", headers={"x-claude-code-agent-id": name}
            )
        for at, name in enumerate(order):
            agent = agents[name]
            turn = order[:at].count(name)
            world.random.seed(f"{name}{turn}")
            world.fresh = 1000 + 10 * turn + 100 * "mxy".index(name)
            world.turn(agent)
        threads = {call.call_id: call.thread for call in world.calls}
        return {
            (
                sample.ids,
                sample.logprobs,
                tuple((span.start, span.stop, threads[span.call_id], span.offset, span.state) for span in sample.spans),
            )
            for sample in samples_of(world.calls).samples
        }

    assert len(rows("mmxxyy")) == 3
    assert rows("mmxxyy") == rows("mxymxy") == rows("myyxmx") == rows("mxxyym")


# -- single cases, worked out by hand


def linear(turns: int = 3) -> World:
    return play(5, [World.turn] * (turns - 1))


def test_a_straight_session_is_one_row_all_trained() -> None:
    world = linear()
    (sample,) = samples_of(world.calls).samples
    last = world.calls[-1]
    assert sample.ids == last.prompt.ids + last.sampled_ids
    assert [span.call_id for span in sample.spans] == ["c0", "c1", "c2"]
    assert [span.start for span in sample.spans] == [len(call.prompt.ids) for call in world.calls]
    assert sample.trained_tokens == sum(len(call.sampled_ids) for call in world.calls)
    assert (sample.sample_id, sample.attempt_id, sample.rollout_id, sample.group_id) == ("a/c2", "a", "r", "g")


def test_marks_cover_the_row() -> None:
    world = linear()
    (sample,) = samples_of(world.calls).samples
    marks = annotate(sample)
    assert tuple(id_ for mark in marks for id_ in mark.ids) == sample.ids
    assert [mark.state for mark in marks] == ["context", "trained"] * 3
    assert [mark.call_id for mark in marks] == [None, "c0", None, "c1", None, "c2"]


def test_a_shared_token_trains_in_the_branch_that_goes_furthest() -> None:
    """c1 and c2 both continue c0 (the harness dropped c1's turn): c0 trains once, in the longer row."""
    world = play(3, [World.drop_turn, World.turn])
    short, long = samples_of(world.calls).samples
    assert [span.call_id for span in short.spans] == ["c1"]
    assert [span.call_id for span in long.spans] == ["c0", "c2"]
    assert short.ids[: len(world.calls[1].prompt.ids)] == world.calls[1].prompt.ids  # c0 is there, as context


def test_a_replaced_stop_token_is_dropped_as_closing_inside_a_row_and_trained_at_its_end() -> None:
    inside = samples_of(play(3, [World.other_end_turn, World.turn]).calls).totals
    assert inside.dropped == {"closing": 1}
    at_the_end = samples_of(play(3, [World.other_end_turn]).calls).totals
    assert at_the_end.dropped == {}
    assert at_the_end.trained == at_the_end.sampled


def test_reasons_by_source() -> None:
    world = linear()
    greedy = [msgspec.structs.replace(world.calls[0], off_policy="greedy"), *world.calls[1:]]
    first = len(world.calls[0].sampled_ids)
    assert samples_of(greedy).totals.masked == {"off_policy:greedy": first}
    assert samples_of(greedy, source=Source.TEACHER).totals.masked == {}
    blind = [msgspec.structs.replace(world.calls[0], logprobs=None), *world.calls[1:]]
    masked = samples_of(blind)
    assert masked.totals.masked == {"no_logprobs": masked.totals.sampled}
    assert masked.samples[0].logprobs is None
    taught = samples_of(blind, source=Source.TEACHER)
    assert taught.totals.trained == taught.totals.sampled
    assert taught.samples[0].logprobs is None


def test_train_roles_are_a_setting() -> None:
    world = play(2, [World.spawn, World.title, World.rogue])
    tokens = {call.role: len(call.sampled_ids) for call in world.calls}
    only_side = samples_of(world.calls, SamplePolicy(train_roles=(ThreadRole.SIDE,))).totals
    assert only_side.trained == tokens[ThreadRole.SIDE]
    assert only_side.masked == {
        f"role:{role.value}": tokens[role] for role in (ThreadRole.MAIN, ThreadRole.SUBAGENT, ThreadRole.UNATTRIBUTED)
    }


def test_stale_tokens_are_masked_one_by_one() -> None:
    """Weights changed from version 1 to 2 in the middle of c0; the trainer is at 4 and takes two versions back."""
    world = linear(1)
    call = world.calls[0]
    length = len(call.sampled_ids)
    mixed = msgspec.structs.replace(
        call,
        weights_spans=(WeightsSpan(start=0, stop=1, version=1), WeightsSpan(start=1, stop=length, version=2)),
    )
    policy = SamplePolicy(max_staleness=2)
    (sample,) = samples_of([mixed], policy, weights_version=4).samples
    assert [(span.state, span.reason, span.weights_version, span.offset) for span in sample.spans] == [
        ("masked", "stale", 1, 0),
        ("trained", None, 2, 1),
    ]
    assert samples_of([mixed], policy, weights_version=3).totals.masked == {}
    with pytest.raises(InputError, match="weights_version"):
        samples_of([mixed], policy)
    torn = msgspec.structs.replace(call, weights_spans=(WeightsSpan(start=1, stop=length, version=2),))
    with pytest.raises(ExactnessError, match="gap"):
        samples_of([torn])


def test_too_long_rows_are_dropped_whole_and_counted() -> None:
    world = play(3, [World.drop_turn, World.turn])
    short, long = samples_of(world.calls).samples
    cut = samples_of(world.calls, SamplePolicy(max_row_tokens=len(long.ids) - 1))
    # c0 now trains in the shorter row, so only the last call is lost.
    assert [sample.sample_id for sample in cut.samples] == [short.sample_id]
    assert [span.call_id for span in cut.samples[0].spans] == ["c0", "c1"]
    assert cut.totals.dropped == {"too_long": len(world.calls[2].sampled_ids)}
    none = samples_of(world.calls, SamplePolicy(max_row_tokens=1))
    assert none.samples == ()
    assert none.totals.dropped == {"too_long": none.totals.sampled}


def test_of_identical_requests_the_continued_one_counts_else_the_last_delivered() -> None:
    world = World(4)
    main = world.agents[0]
    first = world.finish(world.begin(main))
    second = world.finish(world.begin(main))
    third = world.finish(world.begin(main), status=CallStatus.ABORTED, ending=None)
    totals = samples_of(world.calls).totals
    assert totals.trained == len(second.sampled_ids)
    assert totals.dropped == {"aborted": len(third.sampled_ids), "retry": len(first.sampled_ids)}
    world.go_on(main, first)
    world.turn(main)
    (sample,) = samples_of(world.calls).samples
    assert [span.call_id for span in sample.spans] == ["c0", "c3"]
    assert samples_of(world.calls).totals.dropped == {
        "aborted": len(third.sampled_ids),
        "retry": len(second.sampled_ids),
    }
    # The harness goes back and continues the second answer too: both are real.
    main.messages = [*main.messages[:2]]
    world.go_on(main, second)
    world.turn(main)
    assert samples_of(world.calls).totals.dropped == {"aborted": len(third.sampled_ids)}


def test_an_empty_answer_gives_an_empty_mask() -> None:
    world = World(1)
    call = world.finish(world.begin(world.agents[0]), ending=None, empty=True)
    samples = samples_of([call])
    assert samples.totals.sampled == 0
    (sample,) = samples.samples
    assert sample.spans == () and sample.logprobs == ()


def test_nothing_recorded_gives_nothing() -> None:
    assert samples_of([]) == SampleSet(samples=(), totals=samples_of([]).totals)
    assert samples_of([]).totals.sampled == 0


def test_a_call_the_process_died_in_is_unfinished() -> None:
    world = World(1)
    world.begin(world.agents[0])
    assert samples_of(world.calls).samples == ()


def test_imported_calls_without_history_hang_on_what_their_ids_say() -> None:
    world = linear()
    bare = [msgspec.structs.replace(call, parent_call_id=None) for call in world.calls]
    assert build("a", bare).branches[0].calls == ("c0", "c1", "c2")
    assert samples_of(bare) == samples_of(world.calls)
