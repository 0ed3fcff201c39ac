"""The one watch of a run, while API server and network do what they do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, POD, ClusterError, Object
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.watching import News, PodWatch
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS
from openforgerl.types import SandboxSpec

LABELS = "openforgerl/run=r"


@pytest.fixture
async def cluster(fake: FakeCluster, tmp_path: Any) -> Any:
    kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
    opened = HttpCluster(find_access(str(kubeconfig), "", {}), first_pause=0.01)
    yield opened
    await opened.close()


@pytest.fixture
async def watch(cluster: HttpCluster) -> Any:
    opened = PodWatch(cluster, LABELS, relist_seconds=300, first_pause=0.01)
    await opened.start()
    yield opened
    await opened.close()


def manifest(name: str) -> Object:
    container = {"name": "rollout", "image": "system:1", "command": ["/bin/sleep", "60"]}
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    return {"metadata": {"name": name, "labels": {"openforgerl/run": "r"}}, "spec": spec}


async def running(news: News) -> None:
    async with asyncio.timeout(20):
        while news.pod is None or news.pod["status"].get("phase") != "Running":
            await news.change()


async def gone(news: News) -> None:
    async with asyncio.timeout(20):
        while not news.gone:
            await news.change()


async def life(cluster: HttpCluster, watch: PodWatch, name: str) -> None:
    """A pod is made, seen running, deleted, seen gone."""
    news = watch.follow(name)
    news.made(await cluster.create(POD, manifest(name)))
    await running(news)
    await cluster.delete(POD, name, uid=news.uid, grace=0)
    await gone(news)
    watch.leave(name)


async def test_one_list_and_one_watch_serve_all(fake: FakeCluster, cluster: HttpCluster, watch: PodWatch) -> None:
    await asyncio.gather(*(life(cluster, watch, f"p{number}") for number in range(8)))
    assert (fake.counts.calls["list", "pods"], fake.counts.calls["watch", "pods"]) == (1, 1)


@pytest.mark.parametrize("gone_as", ["event", "status"])
async def test_a_version_that_is_gone_means_list_again(
    fake: FakeCluster, cluster: HttpCluster, watch: PodWatch, gone_as: Any
) -> None:
    fake.faults.gone_as = gone_as
    await life(cluster, watch, "p1")
    fake.compact()
    if gone_as == "event":
        fake.expire_watches()
    else:
        await fake.restart(0.05)
    await life(cluster, watch, "p2")
    assert watch.lists >= 2


async def test_an_api_server_that_restarts_loses_us_nothing(
    fake: FakeCluster, cluster: HttpCluster, watch: PodWatch
) -> None:
    """What happens while it is away is found by the list afterwards: also a deletion."""
    news = watch.follow("p1")
    news.made(await cluster.create(POD, manifest("p1")))
    await running(news)
    await fake.stop_serving()
    stored = fake.objects.list(PODS)
    assert len(stored) == 1 and not news.gone
    await asyncio.sleep(0.3)
    assert not news.gone  # a server that does not answer has deleted nothing
    await fake._listen()
    await cluster.delete(POD, "p1", uid=news.uid, grace=0)
    await gone(news)


async def test_throttling_and_errors_are_waited_out(fake: FakeCluster, tmp_path: Any, backend: Any) -> None:
    """Plain-text 429s and 500s on a tenth of all requests each; masters are never throttled, so we are none."""
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    token = fake.access.add("orchestrator", [rule], namespace="rollouts")
    fake.faults.throttle_rate = fake.faults.error_rate = 0.1
    fake.faults.retry_after = 0
    async with backend(token=token) as sandboxes:

        async def one(number: int) -> bytes:
            async with sandboxes.create(SandboxSpec(run_id="run-1"), f"t-r{number}-a1") as sandbox:
                return (await sandbox.exec(["echo", str(number)], env={}, timeout=20)).stdout

        assert await asyncio.gather(*(one(number) for number in range(12))) == [str(n).encode() for n in range(12)]
    assert fake.counts.answers[429] > 0 and fake.counts.answers[500] > 0


async def test_sandboxes_live_through_a_restart_of_the_api_server(fake: FakeCluster, backend: Any) -> None:
    async with backend() as sandboxes, sandboxes.create(SandboxSpec(run_id="run-1"), "t-r0-a1") as sandbox:
        await fake.stop_serving()
        assert (await sandbox.exec(["echo", "x"], env={}, timeout=20)).stdout == b"x"  # it needs no API server
        await fake._listen()
        assert (await sandbox.exec(["echo", "y"], env={}, timeout=20)).stdout == b"y"
    await fake.settled()


async def test_an_empty_selector_never_means_everything(cluster: HttpCluster) -> None:
    with pytest.raises(ValueError, match="selector"):
        await cluster.delete_all(POD, labels="")


async def test_a_list_of_many_pages_is_one_list(fake: FakeCluster, cluster: HttpCluster) -> None:
    for number in range(1203):
        fake.registry.create(CONFIG_MAPS, "rollouts", {"metadata": {"name": f"c{number}", "labels": {"a": "b"}}})
    listing = await cluster.list(CONFIG_MAP, labels="a=b")
    assert len({item["metadata"]["name"] for item in listing.items}) == 1203


async def test_what_is_refused_for_good_is_not_asked_again(fake: FakeCluster, cluster: HttpCluster) -> None:
    with pytest.raises(ClusterError) as refused:
        await cluster.create(POD, {"metadata": {"name": "Not A Name"}, "spec": {}})
    assert refused.value.status in (400, 422) and not refused.value.passing
    assert fake.counts.calls["create", "pods"] == 1
