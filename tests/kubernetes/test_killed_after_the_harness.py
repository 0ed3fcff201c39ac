"""kill -9 between the end of a harness and its stored outcome: the attempt goes on, and the harness runs once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

from openforgerl.testing.fake_init import FakePod
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec
from openforgerl.testing.fake_kubernetes.kinds import PODS
from openforgerl.testing.fake_sandbox import Program
from openforgerl.types import Exit, Verdict

from .storming import storm

HERE = Path(__file__).parent


class CountingPods(storm.StormPods):
    """Counts how often each program is started in which pod."""

    def __init__(self) -> None:
        super().__init__(seconds=1.0)
        self.started: Counter[str] = Counter()

    async def play(self, pod: FakePod, program: Program) -> Exit:
        self.started[program.argv[0]] += 1
        return await super().play(pod, program)


async def life(folder: Path, kubeconfig: Path) -> int:
    words = [sys.executable, str(HERE / "dying.py"), str(folder), str(kubeconfig)]
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log)
    return await process.wait()


async def test_an_attempt_whose_end_was_heard_and_not_stored_goes_on(tmp_path: Path) -> None:
    pods = CountingPods()
    options = ClusterOptions(
        nodes=[NodeSpec(name="node-1")],
        namespaces=["rollouts"],
        clock=Clock(cluster=0.02),
        images={"coroutine:*": Image(program=pods.program, handles_term=True)},
    )
    async with FakeCluster(options) as fake:
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        log = tmp_path / "log"
        assert await life(tmp_path, kubeconfig) == -signal.SIGKILL, log.read_text()[-3000:]
        assert (tmp_path / "died").exists() and fake.objects.list(PODS) != []
        assert await life(tmp_path, kubeconfig) == 0, log.read_text()[-3000:]
        await pods.close()
        assert fake.objects.list(PODS) == []
    _, attempts = await storm.recorded(tmp_path)
    assert len(attempts) == storm.GROUP and all(isinstance(attempt.outcome, Verdict) for attempt in attempts), attempts
    assert [attempt.number for attempt in attempts] == [0] * storm.GROUP
    assert pods.started["agent"] == storm.GROUP
