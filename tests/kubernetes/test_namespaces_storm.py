"""Many rollouts in namespaces whose quotas are far too small, while one pod in ten meets a fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from openforgerl.config import RoomsConfig
from openforgerl.orchestrator import RunOptions
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.admission import finished
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS, QUOTAS, RESOURCES, Resource
from openforgerl.testing.fake_kubernetes.objects import Change
from openforgerl.types import Verdict

from .storming import storm

LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")


@pytest.mark.parametrize(
    ("namespaces", "room", "groups", "concurrency"),
    [(("rollouts",), 1, 2, 8), (("rollouts",), 12, 9, 30), (("rollouts", "more-1", "more-2"), 4, 9, 30)],
    ids=["one-pod", "one-namespace", "three"],
)
async def test_more_attempts_than_quotas_have_room_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    namespaces: tuple[str, ...],
    room: int,
    groups: int,
    concurrency: int,
) -> None:
    """Each attempt needs a second pod before it gives up its first: without a way out all would wait for ever."""
    make_config = storm.make_config

    def with_more(kubeconfig: Path, concurrency: int) -> tuple[RoomsConfig, RunOptions]:
        config, run = make_config(kubeconfig, concurrency)
        chosen = msgspec.structs.replace(config.sandbox.kubernetes, more_namespaces=namespaces[1:])
        sandbox = msgspec.structs.replace(config.sandbox, kubernetes=chosen)
        return msgspec.structs.replace(config, sandbox=sandbox), run

    monkeypatch.setattr(storm, "make_config", with_more)
    monkeypatch.setattr("openforgerl.rollout.attempt.PATIENCE", 0.5)
    pods = storm.StormPods(seconds=0.2)
    nodes = [NodeSpec(name=f"node-{number}") for number in range(4)]
    images = {"coroutine:*": Image(program=pods.program, handles_term=True)}
    options = ClusterOptions(nodes=nodes, namespaces=namespaces, clock=Clock(cluster=0.02), images=images)
    made: Counter[str] = Counter()
    most: Counter[str] = Counter()
    async with FakeCluster(options) as fake:
        for namespace in namespaces:
            quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": str(room)}}}
            fake.registry.create(QUOTAS, namespace, quota)
        fake.scenarios.at_random(0.1, seed=5)

        def noted(resource: Resource, change: Change) -> None:
            if resource is PODS and change.kind == "ADDED":
                namespace = change.now.key[0]
                made[namespace] += 1
                living = [one for one in fake.objects.list(PODS, namespace) if not finished(one.body)]
                most[namespace] = max(most[namespace], len(living))

        fake.objects.listeners.append(noted)
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        last = await storm.live(tmp_path, kubeconfig, groups, concurrency)
        await pods.close()
        fake.restore_nodes()
        await fake.settled(60)
        assert [fake.objects.list(kind) for kind in (PODS, CONFIG_MAPS, LEASES)] == [[], [], []]
        planted: dict[str, list[tuple[str, bool]]] = {}
        for one in fake.scenarios.planted.values():
            planted.setdefault(one.name, []).append((one.scenario.name, one.struck is not None))
        calls, refused = Counter(fake.counts.calls), fake.counts.answers[403]
    assert len(last) == groups * storm.GROUP and all(isinstance(attempt.outcome, Verdict) for attempt in last)
    run_id, attempts = await storm.recorded(tmp_path)
    counts = storm.judged(run_id, attempts, planted)
    print(f"\n{len(last)} rollouts, {len(attempts)} attempts: {dict(counts)}; pods {dict(made)}, at most {dict(most)}")
    print(f"{sum(calls.values()) / len(last):.1f} API calls a rollout, {refused} refusals")
    assert set(made) == set(namespaces) and max(most.values()) <= room
    assert min(made.values()) > sum(made.values()) / (2 * len(namespaces))  # each does its part
    assert (calls["watch", "pods"], refused > 0) == (len(namespaces), True)
