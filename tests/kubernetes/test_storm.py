"""Many rollouts at once while one pod in ten meets a fault: every one ends, and is called what it was."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Verdict

from .storming import storm


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


@pytest.mark.slow
@pytest.mark.node
@pytest.mark.sandbox
@pytest.mark.timeout(1800)
async def test_sixty_rollouts_in_pi_eight_at_once(tmp_path: Path) -> None:
    """The real harness in real processes, while one pod in ten meets a fault."""
    script = tmp_path / "script.json"
    script.write_text('{"answers": [{"text": "Done."}]}')
    tiny, tasks = write_tiny_model(tmp_path / "tiny"), storm.write_tasks(tmp_path / "tasks")
    nodes = [NodeSpec(name=f"node-{number}") for number in range(4)]
    async with FakeCluster(ClusterOptions(nodes=nodes, namespaces=["rollouts"], clock=Clock(cluster=0.1))) as fake:
        fake.scenarios.at_random(0.1, seed=3)
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        settings = {
            "run.concurrency": 8,
            "run.stop_after": 100,
            "limits.memory_mb": 1024,
            "sandbox.kubernetes.image": "system:1",
            "sandbox.kubernetes.layers": "host",
            "sandbox.kubernetes.grace": 1,
            "sandbox.kubernetes.schedule_timeout": 20.0,
            "sandbox.kubernetes.pull_timeout": 5.0,
            "sandbox.kubernetes.lost_node_timeout": 2.0,
        }
        words = ["run", tasks, "--engine", f"scripted:{script}", "--tokenizer", tiny, "--harness", "pi"]
        words += ["--sandbox", "kubernetes", "-s", "attempts=6", "--run", tmp_path / "run"]
        words += [word for name, value in settings.items() for word in ("-s", f"{name}={value}")]
        begun = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("openforgerl")),
            *map(str, words),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()[-4000:]
        seconds = time.monotonic() - begun
        fake.restore_nodes()
        await fake.settled(60)
        assert fake.objects.list(PODS) == [] and fake.objects.list(CONFIG_MAPS) == []
        assert fake.kubelet.lives == {}
        planted: dict[str, list[tuple[str, bool]]] = {}
        for one in fake.scenarios.planted.values():
            planted.setdefault(one.name, []).append((one.scenario.name, one.struck is not None))
        calls = Counter(fake.counts.calls)
    run_id, attempts = await storm.recorded(tmp_path)
    counts = storm.judged(run_id, attempts, planted)
    print(f"\n60 rollouts in pi, {len(attempts)} attempts, {seconds:.1f} s: {dict(counts)}")
    print(f"API calls: {sum(calls.values()) / 60:.2f} a rollout")
    assert counts["verdict"] == 60
