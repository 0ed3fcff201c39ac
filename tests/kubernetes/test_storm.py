"""Many rollouts at once while one pod in ten meets a fault: every one ends, and is called what it was."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS
from openforgerl.types import Verdict


def load_storm() -> Any:
    """`storm.py` as a module that `module:Class` finds."""
    spec = importlib.util.spec_from_file_location("storm", Path(__file__).with_name("storm.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["storm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


storm = load_storm()


@pytest.mark.parametrize(
    ("groups", "concurrency"),
    [pytest.param(50, 50), pytest.param(500, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
async def test_every_rollout_ends_and_is_called_what_it_was(tmp_path: Path, groups: int, concurrency: int) -> None:
    pods = storm.StormPods(seconds=0.2)
    nodes = [NodeSpec(name=f"node-{number}") for number in range(16)]
    images = {"coroutine:*": Image(program=pods.program, handles_term=True)}
    options = ClusterOptions(nodes=nodes, namespaces=["rollouts"], clock=Clock(cluster=0.02), images=images)
    async with FakeCluster(options) as fake:
        fake.scenarios.at_random(0.1, seed=7)
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        begun = time.monotonic()
        last = await storm.live(tmp_path, kubeconfig, groups, concurrency)
        seconds = time.monotonic() - begun
        await pods.close()
        fake.restore_nodes()
        await fake.settled(60)
        assert fake.objects.list(PODS) == [] and fake.objects.list(CONFIG_MAPS) == []
        assert fake.kubelet.lives == {}
        planted: dict[str, list[tuple[str, bool]]] = {}
        for one in fake.scenarios.planted.values():
            planted.setdefault(one.name, []).append((one.scenario.name, one.struck is not None))
        calls, answers = Counter(fake.counts.calls), Counter(fake.counts.answers)
    assert len(last) == groups * storm.GROUP
    assert all(isinstance(attempt.outcome, Verdict) for attempt in last)  # every group is full
    run_id, attempts = await storm.recorded(tmp_path)
    counts = storm.judged(run_id, attempts, planted)
    print(f"\n{len(last)} rollouts, {len(attempts)} attempts, {seconds:.1f} s: {dict(counts)}")
    print(f"faults: {dict(Counter(name for found in planted.values() for name, _ in found))}")
    print(f"API calls: {sum(calls.values()) / len(last):.2f} a rollout; {dict(calls)}; answers {dict(answers)}")
    assert calls["list", "pods"] < 20 + len(last) / 100  # no polling
    assert not any(resource == "pods/exec" for _, resource in calls)
    assert sum(calls.values()) / len(last) < 8
