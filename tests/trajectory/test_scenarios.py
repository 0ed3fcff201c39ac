"""The fidelity benchmark, small: all that was sampled and kept trains, under the context that the model saw."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.errors import ExactnessError
from openforgerl.rendering import load_renderer
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.trajectory import audit_attempt, build, find_breaks
from openforgerl.types import SampleSet, ThreadRole, Totals

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Any:
    """The benchmark's modules, imported as the script imports them."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    request.addfinalizer(patch.undo)
    import fidelity  # noqa: PLC0415  (a script, on the path for this fixture only)

    request.addfinalizer(lambda: [sys.modules.pop(name) for name in ("fidelity", "fidelity_scenarios")])
    return fidelity


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


TURNS = 10
ROWS = {
    "linear": 1,
    "10 % other encodings": 1,
    "thinking stripped": TURNS,  # the template shows each thought in one prompt only
    "two sub-agents interleaved": 3,
    "five identical retries": 1,
    "compaction": 3,  # before, the summary, after
    "four sub-agents in flight": 5,
    "both retries continued": 2,
    "compactions interleaved": 2 + 2 * 2,  # parent and child, and for each compaction the summary and what follows
    "tool list changes": 2,
    "screenshot window": 1 + (TURNS - 1 - 3),  # from the fifth request on, each drops another screenshot
    "long rollout": 1,
    "arguments re-serialised": 1,
    "NFC and NFD": 2,  # the fifth answer comes back changed; the tenth is the last
    "lone surrogates": 1,
    "aborted streams": 1,  # the part that is kept is written by the template as it was sampled
    "cut by length": 1,
    "reasoning dropped": TURNS,
    "parallel tool calls": 1,
    "changing header": TURNS,
    "side requests": 3,
    "structure in data": 1,
}
"""Rows of each scenario, counted by hand: one per conversation, and one more wherever what the model saw was
rewritten."""


BREAKS = {
    "thinking stripped": {"thought_stripped_by_template": TURNS - 1},
    "compaction": {"compacted": 1},
    "compactions interleaved": {"compacted": 2},
    "tool list changes": {"tools_changed": 1},
    "screenshot window": {"observation_edited": TURNS - 1 - 3},
    "NFC and NFD": {"unicode_normalised": 1},
    "reasoning dropped": {"reasoning_dropped": TURNS - 1},
    "changing header": {"marker_changed": TURNS - 1},
}
"""What broke prefixes, where anything did: every row beyond one per conversation has its cause."""

Run = Callable[[str], tuple[list[Any], Any]]
"""Name of a scenario → its calls and what the benchmark counts."""


@pytest.fixture(scope="module")
def run(bench: Any, renderer: ChatRenderer) -> Run:
    found: dict[str, tuple[list[Any], Any]] = {}

    def once(name: str) -> tuple[list[Any], Any]:
        if name not in found:
            calls = bench.play((bench.PEERS | bench.MORE)[name], renderer, bench.SMALL)
            found[name] = calls, bench.measure(calls)
        return found[name]

    return once


def test_all_scenarios_are_expected(bench: Any) -> None:
    assert (bench.PEERS | bench.MORE).keys() == ROWS.keys()
    assert len(bench.PEERS) == 6 and len(bench.MORE) >= 10
    assert bench.SMALL.turns == TURNS


@pytest.mark.parametrize("name", ROWS)
def test_every_kept_token_trains_once_in_few_rows(run: Run, name: str) -> None:
    calls, found = run(name)
    totals: Totals = found.samples.totals
    asides = sum(len(call.sampled_ids) for call in calls if call.role is ThreadRole.SIDE)
    assert totals.masked == ({"role:side": asides} if asides else {})
    assert totals.sampled == sum(len(call.sampled_ids) for call in calls)
    assert set(totals.dropped) == {"five identical retries": {"retry"}, "aborted streams": {"aborted"}}.get(name, set())
    assert len(found.samples.samples) == ROWS[name]
    assert found.tree_tokens <= 1.05 * found.unique_tokens
    assert not any(call.role is ThreadRole.UNATTRIBUTED for call in calls)


@pytest.mark.parametrize("name", ROWS)
def test_every_further_row_has_its_cause_named(run: Run, name: str) -> None:
    calls, _ = run(name)
    assert Counter(found.cause for found in find_breaks(build("a", calls))) == BREAKS.get(name, {})


def test_an_audit_of_every_scenario_finds_nothing_wrong(run: Run) -> None:
    for name in ROWS:
        calls, found = run(name)
        audited = audit_attempt(build("a", calls), found.samples)
        assert audited.findings == (), name
        assert sum(call.sampled for call in audited.calls) == found.samples.totals.sampled
        assert sum(call.trained for call in audited.calls) == found.samples.totals.trained
        assert sum(sum(call.dropped.values()) for call in audited.calls) == sum(found.samples.totals.dropped.values())


def test_what_is_lost_is_what_the_harness_threw_away(run: Run) -> None:
    calls, found = run("five identical retries")
    asked: dict[int, Any] = {}
    thrown = 0
    for call in calls:  # the first of two with the same number of messages is the lost one
        length = len(call.conversation.messages)
        thrown += len(asked[length].sampled_ids) if length in asked else 0
        asked[length] = call
    assert found.samples.totals.dropped == {"retry": thrown}


def test_samples_repeat_what_the_engine_saw(run: Run) -> None:
    """Not through the account's own eyes: prompt and answer of every span against the recorded call."""
    for name in ROWS:
        calls, found = run(name)
        by_id = {call.call_id: call for call in calls}
        samples: SampleSet = found.samples
        for sample in samples.samples:
            for span in sample.spans:
                call = by_id[span.call_id]
                seen = call.prompt.ids + call.sampled_ids
                assert sample.ids[: span.stop] == seen[: span.stop], name
                assert span.stop - len(call.prompt.ids) == span.offset + span.stop - span.start


def test_a_prompt_that_lies_about_what_it_restored_is_no_sample(bench: Any) -> None:
    """The tree takes a prompt's word for what it restored; the sample does not."""
    first, second = bench.long_session(2, answer=4, observation=4, system=20)
    ids = (first.prompt.ids[0] + 1, *second.prompt.ids[1:])
    lying = msgspec.structs.replace(second, prompt=msgspec.structs.replace(second.prompt, ids=ids))
    assert len(bench.reconstruct([first, second]).samples) == 1
    with pytest.raises(ExactnessError, match="is not what the engine saw when call c0 sampled it"):
        bench.reconstruct([first, lying])
    honest = msgspec.structs.replace(lying, prompt=msgspec.structs.replace(lying.prompt, origins=()))
    assert len(bench.reconstruct([first, honest]).samples) == 2


def test_unique_tokens_are_counted_right(bench: Any) -> None:
    """abc, abd and x: a, b, c, d, x."""

    class Row:
        def __init__(self, *ids: int) -> None:
            self.ids = ids

    assert bench.unique_tokens([Row(1, 2, 3), Row(9), Row(1, 2, 4)]) == 5


def test_a_session_of_a_thousand_calls_takes_less_than_two_seconds(bench: Any) -> None:
    calls = bench.long_session(1000, answer=20, observation=60, system=1000)
    started = time.process_time()
    (sample,) = bench.reconstruct(calls).samples
    assert time.process_time() - started < 2
    assert (len(sample.ids), sample.trained_tokens) == (1000 + 999 * 80 + 20, 20000)
