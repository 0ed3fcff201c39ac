"""What becomes of every sampled token, scenario by scenario, and what the rows cost.

    OMP_NUM_THREADS=1 python benchmarks/fidelity.py [--small] [--only NAME ...] [--json docs/results/fidelity.json]

Sampled, trained, masked and dropped tokens are the account of `trajectory.build_samples`, asserted there. Tokens in
the tree are what the embedded trainer computes when all rows of the session go through it at once; unique tokens are
the least that holds every row: each prefix once. The last lines time a session of 1,000 calls from its records to its
rows. The tokenizer is the tiny test model's, so tokens are about two characters long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelity_scenarios import MORE, PEERS, SMALL, Scenario, Session, Size

from openforgerl.rendering import load_renderer
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.options import LearnerOptions
from openforgerl.training.packing import common_length, pack, row_of
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Message,
    ModelCall,
    OriginSpan,
    Prompt,
    Role,
    Rollout,
    Sample,
    SampleSet,
    Source,
    Text,
    ThreadRole,
)

ROLLOUT = Rollout(
    rollout_id="r",
    run_id="run",
    task="t",
    task_digest="",
    harness="h",
    group_id="g",
    index=0,
    seed=0,
    purpose="train",
)


@dataclass(frozen=True)
class Fidelity:
    """One scenario's numbers."""

    calls: int
    samples: SampleSet
    row_tokens: int
    tree_tokens: int
    unique_tokens: int
    seconds: float
    """CPU, from calls to rows."""


def measure(calls: Sequence[ModelCall]) -> Fidelity:
    """Reconstruct a session's rows and count."""
    started = time.process_time()
    samples = reconstruct(calls)
    seconds = time.process_time() - started
    rows = samples.samples
    return Fidelity(
        calls=len(calls),
        samples=samples,
        row_tokens=sum(len(sample.ids) for sample in rows),
        tree_tokens=tree_tokens(rows),
        unique_tokens=unique_tokens(rows),
        seconds=seconds,
    )


def reconstruct(calls: Sequence[ModelCall]) -> SampleSet:
    """The session's samples, as the orchestrator makes them."""
    return build_samples(build("a", calls), rollout=ROLLOUT, source=Source.POLICY, policy=SamplePolicy())


def unique_tokens(rows: Sequence[Sample]) -> int:
    """Nodes of the prefix tree of all rows: sorted rows share with their neighbour what they share with any."""
    ordered = sorted(row.ids for row in rows)
    shared = sum(common_length(left, right) for left, right in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - shared


def tree_tokens(rows: Sequence[Sample]) -> int:
    """Ids that go through the model when the learner packs all rows at once."""
    made = [row_of(sample, 1.0, needs_logprobs=False) for sample in rows]
    packed = pack(made, min_shared=LearnerOptions().min_shared_tokens)
    return int(packed.ids_N.numel())


def play(scenario: Scenario, renderer: ChatRenderer, size: Size, seed: int = 0) -> list[ModelCall]:
    """The calls of one scenario's session."""
    session = Session(renderer, seed, size)
    scenario(session)
    return session.calls


def long_session(turns: int, *, answer: int = 150, observation: int = 400, system: int = 3000) -> list[ModelCall]:
    """An appending session, made of ids alone."""
    calls: list[ModelCall] = []
    ids = tuple(range(1000, 1000 + system))
    origins = (OriginSpan(start=0, stop=system, kind="data", message=0),)
    messages = (Message(role=Role.USER, parts=(Text("go"),)),)
    for turn in range(turns):
        sampled = tuple(5000 + (turn * 7 + at) % 20000 for at in range(answer))
        said = Message(role=Role.ASSISTANT, parts=(Text(f"answer {turn}"),))
        calls.append(
            ModelCall(
                call_id=f"c{turn}",
                session_id="s",
                index=turn,
                dialect="chat",
                thread="main",
                role=ThreadRole.MAIN,
                role_evidence="",
                parent_call_id=f"c{turn - 1}" if turn else None,
                status=CallStatus.COMPLETE,
                conversation=Conversation(messages=messages),
                prompt=Prompt(ids=ids, origins=origins),
                sampled_ids=sampled,
                logprobs=(-0.5,) * answer,
                weights_version=1,
                finish_reason=FinishReason.STOP,
                answer=said,
                timing=CallTiming(received=float(turn)),
            )
        )
        middle, stop = len(ids) + answer, len(ids) + answer + observation
        origins = (
            *origins,
            OriginSpan(start=len(ids), stop=middle, kind="call", call_id=f"c{turn}", offset=0),
            OriginSpan(start=middle, stop=stop, kind="data", message=2 * turn + 2),
        )
        ids = ids + sampled + tuple(200 + (turn + at) % 700 for at in range(observation))
        messages = (*messages, said, Message(role=Role.USER, parts=(Text(f"seen {turn}"),)))
    return calls


def _record(found: Fidelity) -> dict[str, Any]:
    """One scenario's numbers for `--json`."""
    totals = found.samples.totals
    return {
        "calls": found.calls,
        "sampled": totals.sampled,
        "trained": totals.trained,
        "masked": totals.masked,
        "dropped": totals.dropped,
        "rows": len(found.samples.samples),
        "tokens_in_rows": found.row_tokens,
        "tokens_in_tree": found.tree_tokens,
        "unique_tokens": found.unique_tokens,
        "cpu_seconds": round(found.seconds, 3),
    }


def _linear_time() -> list[dict[str, Any]]:
    """An appending session from records to rows, ever longer; printed as it is measured."""
    print("\nan appending session from records to rows:")
    lines: list[dict[str, Any]] = []
    for turns, small in ((125, True), (250, True), (500, True), (1000, True), (1000, False)):
        calls = long_session(turns, answer=20, observation=60, system=1000) if small else long_session(turns)
        started = time.process_time()
        rows = reconstruct(calls).samples
        seconds = time.process_time() - started
        seen = sum(len(call.prompt.ids) for call in calls)
        print(f"{turns:5d} calls, last row {len(rows[-1].ids):6d} ids, {seen:9d} ids in prompts: {seconds:.2f} s CPU")
        lines.append(
            {
                "calls": turns,
                "last_row": len(rows[-1].ids),
                "tokens_in_prompts": seen,
                "cpu_seconds": round(seconds, 3),
            }
        )
        del calls, rows  # two of them would not fit everywhere
    return lines


def _line(name: str, found: Fidelity) -> str:
    totals = found.samples.totals
    left = {**{f"masked {why}": n for why, n in totals.masked.items()}}
    left |= {f"dropped {why}": n for why, n in totals.dropped.items()}
    return (
        f"{name:28} {found.calls:5d} {totals.sampled:8d} {totals.trained:8d} {sum(totals.masked.values()):6d} "
        f"{sum(totals.dropped.values()):7d} {len(found.samples.samples):5d} {found.row_tokens:9d} "
        f"{found.tree_tokens:8d} {found.tree_tokens / found.unique_tokens:6.3f} {found.seconds:6.2f}  "
        + ", ".join(f"{why} {count}" for why, count in left.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short sessions, seconds instead of minutes")
    parser.add_argument("--only", nargs="+", help="names of scenarios")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    size = SMALL if arguments.small else Size()
    print(
        f"{'scenario':28} {'calls':>5} {'sampled':>8} {'trained':>8} {'masked':>6} {'dropped':>7} {'rows':>5} "
        f"{'in rows':>9} {'in tree':>8} {'/uniq.':>6} {'CPU s':>6}"
    )
    scenarios: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_renderer(write_tiny_model(Path(folder)))
        for name, scenario in (PEERS | MORE).items():
            if not arguments.only or name in arguments.only:
                found = measure(play(scenario, renderer, size))
                scenarios[name] = _record(found)
                print(_line(name, found), flush=True)
    linear = [] if arguments.only else _linear_time()
    if arguments.json:
        command = f"OMP_NUM_THREADS=1 python benchmarks/fidelity.py{' --small' if arguments.small else ''}"
        written = {"command": command, "scenarios": scenarios, "appending_session": linear}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
