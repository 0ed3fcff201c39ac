"""A recorded attempt: real renderer, real chat bodies, branches, a masked side request and a thrown-away retry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from openforgerl.formats import AttemptRecord
from openforgerl.rendering import load_renderer
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import Attempt, ModelCall, Rollout, SampleSet, Source, Verdict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def scenarios() -> Any:
    """The fidelity benchmark's sessions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import fidelity_scenarios  # noqa: PLC0415  (beside a script, on the path for this fixture only)

        sys.modules.pop("fidelity_scenarios")
        return fidelity_scenarios


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def renderer(tiny: Path) -> ChatRenderer:
    return load_renderer(tiny)


def record_of(calls: list[ModelCall], number: int = 0, *, reward: float = 1.0) -> AttemptRecord:
    """The record of an attempt with these calls; rollouts come in groups of two."""
    rollout = Rollout(
        rollout_id=f"r{number}",
        run_id="run",
        task=f"task-{number // 2}",
        task_digest="d",
        harness="pi",
        group_id=f"g{number // 2}",
        index=number % 2,
        seed=1,
        purpose="train",
        step=3,
    )
    verdict = Verdict(reward=reward, passed=reward == 1.0)
    attempt = Attempt(
        attempt_id=f"r{number}-a0",
        rollout_id=rollout.rollout_id,
        number=0,
        started_at=0.0,
        outcome=verdict,
        harness={"version": "1.2"},
    )
    samples: SampleSet = build_samples(
        build(attempt.attempt_id, calls), rollout=rollout, source=Source.POLICY, policy=SamplePolicy()
    )
    return AttemptRecord(rollout=rollout, attempt=attempt, verdict=verdict, calls=tuple(calls), samples=samples)


@pytest.fixture(scope="session")
def records(scenarios: Any, renderer: ChatRenderer) -> list[AttemptRecord]:
    """Four attempts in two groups; between them: one row, stripped thoughts, a side request, retries."""
    size = scenarios.Size(turns=4, system=10, answer=4, observation=5)
    found: list[AttemptRecord] = []
    for number, name in enumerate(("linear", "thinking stripped", "side requests", "five identical retries")):
        session = scenarios.Session(renderer, number, size)
        (scenarios.PEERS | scenarios.MORE)[name](session)
        found.append(record_of(session.calls, number, reward=[1.0, 0.0, 0.25, 1.0][number]))
    return found
