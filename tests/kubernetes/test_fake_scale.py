"""Many pods at once, half of them with faults: the API shows of each what the oracle says was planted in it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest

from openforgerl.testing.fake_kubernetes import (
    FAULTS,
    Clock,
    ClusterOptions,
    FakeCluster,
    Image,
    NodeSpec,
    Planted,
    ProgramContext,
    Shown,
)
from openforgerl.testing.fake_kubernetes.kinds import PODS

from .kubectl import Kubectl, Object, condition, ended, kubectl, pod, state


async def short(context: ProgramContext) -> int:
    await asyncio.sleep(0.3)
    context.print("done")
    return 0


def shows(body: Object, shown: Shown) -> bool:
    """Whether an object has every mark of a planted fault."""
    status, (kind, fields) = body["status"], state(body)
    marks = [status["phase"] == shown.phase, status.get("reason", "") == shown.pod_reason]
    if shown.exit_code is not None:
        marks += [kind == "terminated", fields.get("exitCode") == shown.exit_code]
        marks += [fields.get("reason") == shown.container_reason]
    if shown.waiting_reason:
        marks += [kind == "waiting", fields.get("reason") == shown.waiting_reason]
    if shown.condition:
        name, _, value = shown.condition.partition("=")
        found = condition(body, name)
        marks.append(f"{found.get('status')} {found.get('reason', '')}" == value)
    return all(marks)


class Followed:
    """One watch for all pods, with a list again when it breaks; each pod's states in order."""

    def __init__(self, api: Kubectl) -> None:
        self._api = api
        self.states: dict[str, list[Object]] = {}
        self._news: dict[str, asyncio.Event] = {}

    async def follow(self) -> None:
        while True:
            listed = await self._api.list("pods")
            for body in listed["items"]:
                self._take(body)
            version = listed["metadata"]["resourceVersion"]
            async for event in self._api.watch(resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds="1"):
                assert event["type"] != "ERROR", event
                if event["type"] in ("ADDED", "MODIFIED"):
                    self._take(event["object"])

    def _take(self, body: Object) -> None:
        name = body["metadata"]["name"]
        self.states.setdefault(name, []).append(body)
        if name in self._news:
            self._news.pop(name).set()

    async def until(self, name: str, holds: Any) -> None:
        while not any(holds(body) for body in self.states.get(name, [])[-3:]):
            await self._news.setdefault(name, asyncio.Event()).wait()


async def create(api: Kubectl, name: str) -> None:
    for _ in range(5):
        try:
            status, _ = await api.ask("POST", api.path("pods"), pod(name))
        except aiohttp.ClientError:
            continue
        if status in (201, 409):
            return
        assert status in (403, 429)
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} was never created")


@pytest.mark.parametrize(
    ("count", "at_once"), [(150, 50), pytest.param(2000, 500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_the_oracle_and_the_api_agree(count: int, at_once: int) -> None:
    options = ClusterOptions(
        clock=Clock(cluster=0.02, promised=0.1),
        images={"*": Image(program=short)},
        nodes=[NodeSpec(name=f"node-{number}", pods=200) for number in range(3)],
    )
    checked: Counter[str] = Counter()
    async with FakeCluster(options) as cluster, kubectl(cluster) as api:
        cluster.scenarios.at_random(0.5, seed=5)
        followed = Followed(api)
        following = asyncio.create_task(followed.follow())
        places = asyncio.Semaphore(at_once)

        def final(planted: Planted | None) -> Any:
            """What a pod is to show before it is deleted."""
            shown = None if planted is None else planted.scenario.shown
            return ended if shown is None else lambda body: ended(body) or shows(body, shown)

        async def one(number: int) -> None:
            name = f"pod-{number}"
            async with places:
                await create(api, name)
                planted = (cluster.scenarios.of(name) or [None])[0]
                async with asyncio.timeout(60):
                    await followed.until(name, final(planted))
                last = followed.states[name][-1]
                if planted is None or planted.struck is None or planted.scenario.shown is None:
                    assert last["status"]["phase"] == "Succeeded" or not ended(last), last["status"]
                else:
                    assert any(shows(body, planted.scenario.shown) for body in followed.states[name][-3:]), (
                        planted,
                        last,
                    )
                checked[planted.scenario.name if planted is not None and planted.struck else "none"] += 1
                await api.ask("DELETE", api.path("pods", name), gracePeriodSeconds="0")

        started, used = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
        print(f"\n{count} pods, {at_once} at once: {time.monotonic() - started:.1f} s, ", end="")
        print(f"{time.process_time() - used:.1f} s of CPU; {dict(checked)}")
        following.cancel()
        cluster.restore_nodes()
        await cluster.settled()
        assert cluster.kubelet.containers == [] and cluster.errors == []
        assert cluster.objects.list(PODS) == []
    assert sum(checked.values()) == count
    broken = set(FAULTS) - {"slow-delete"}
    assert len(set(checked) & broken) >= 10  # chance reached most of the faults
