"""Watches of the fake: what a real one sends, and every way in which it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, ProgramContext
from openforgerl.testing.fake_kubernetes.kinds import PODS

from .kubectl import Kubectl, Object, config_map, ended, eventually, kubectl, pod


async def at_once(context: ProgramContext) -> int:
    context.print("done")
    return 0


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeCluster]:
    async with FakeCluster(ClusterOptions(clock=Clock(cluster=0.02), images={"*": Image(program=at_once)})) as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncGenerator[Kubectl]:
    async with kubectl(cluster) as client:
        yield client


async def collect(api: Kubectl, plural: str = "configmaps", **query: str) -> list[Object]:
    return [event async for event in api.watch(plural, **query)]


def told(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]


async def change(api: Kubectl, name: str, merge: Object) -> None:
    await api.ask("PATCH", api.path("configmaps", name), merge, content="application/merge-patch+json")


async def test_from_a_list_s_version_nothing_is_missed_or_doubled(api: Kubectl) -> None:
    await api.create("configmaps", config_map("before"))
    version = await api.version("configmaps")
    watching = asyncio.create_task(collect(api, resourceVersion=version, timeoutSeconds="1"))
    await asyncio.sleep(0.1)
    await api.create("configmaps", config_map("a", {"x": "1"}))
    await change(api, "a", {"data": {"x": "2"}})
    await api.delete("configmaps", "a")
    events = await watching
    assert told(events) == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions) and versions[0] > int(version)
    assert events[2]["object"]["data"] == {"x": "2"}
    # the same past, from the same version, again
    assert told(await collect(api, resourceVersion=version, timeoutSeconds="1")) == told(events)


async def test_without_a_version_it_begins_with_what_there_is(api: Kubectl) -> None:
    await api.create("configmaps", config_map("a"))
    assert told(await collect(api, timeoutSeconds="1")) == [("ADDED", "a")]
    assert told(await collect(api, timeoutSeconds="1", resourceVersion="0")) == [("ADDED", "a")]


async def test_leaving_the_selector_is_a_deletion(api: Kubectl) -> None:
    version = await api.version("configmaps")
    await api.create("configmaps", config_map("a", labels={"run": "1"}))
    await api.create("configmaps", config_map("b", labels={"run": "2"}))
    await change(api, "a", {"metadata": {"labels": {"run": "2"}}})
    await change(api, "a", {"metadata": {"labels": {"run": "1"}}})
    events = await collect(api, labelSelector="run=1", resourceVersion=version, timeoutSeconds="1")
    assert told(events) == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "a")]


async def test_bookmarks_carry_a_version_and_nothing_else(api: Kubectl, cluster: FakeCluster) -> None:
    version = await api.version("configmaps")
    await api.create("pods", pod("p"))  # another resource's changes move the version on
    cluster.faults.bookmark_every = 0.2
    query = {"resourceVersion": version, "timeoutSeconds": "1"}
    events = await collect(api, allowWatchBookmarks="true", **query)
    assert len(events) >= 3 and {event["type"] for event in events} == {"BOOKMARK"}
    assert set(events[0]["object"]) == {"kind", "apiVersion", "metadata"}
    assert int(events[0]["object"]["metadata"]["resourceVersion"]) > int(version)
    assert await collect(api, **query) == []


async def test_a_compacted_version_is_410_in_a_200_stream(api: Kubectl, cluster: FakeCluster) -> None:
    version = await api.version("configmaps")
    await api.create("configmaps", config_map("a"))
    cluster.compact()
    (event,) = await collect(api, resourceVersion=version)
    assert event["type"] == "ERROR" and event["object"]["code"] == 410 and event["object"]["reason"] == "Expired"
    assert event["object"]["message"].startswith(f"too old resource version: {version} (")
    cluster.faults.gone_as = "status"
    status, answer = await api.ask("GET", api.path("configmaps"), watch="1", resourceVersion=version)
    assert (status, answer["reason"]) == (410, "Expired")
    assert told(await collect(api, resourceVersion=await api.version("configmaps"), timeoutSeconds="1")) == []


async def test_an_open_watch_can_expire(api: Kubectl, cluster: FakeCluster) -> None:
    watching = asyncio.create_task(collect(api, resourceVersion=await api.version("configmaps")))
    await asyncio.sleep(0.1)
    await api.create("configmaps", config_map("a"))
    await asyncio.sleep(0.1)
    cluster.expire_watches()
    events = await watching
    assert [event["type"] for event in events] == ["ADDED", "ERROR"] and events[1]["object"]["code"] == 410


async def test_a_version_of_the_future_is_504(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.faults.unset_version_is_504 = True
    (event,) = await collect(api)
    assert event["type"] == "ERROR" and event["object"]["code"] == 504 and event["object"]["reason"] == "Timeout"
    assert "Too large resource version" in event["object"]["message"]
    assert await collect(api, resourceVersion=await api.version("configmaps"), timeoutSeconds="1") == []
    status, answer = await api.ask("GET", api.path("configmaps"), resourceVersion="999999999")
    assert status == 504 and answer["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


async def test_a_restart_breaks_watches_and_keeps_data(api: Kubectl, cluster: FakeCluster) -> None:
    version = await api.version("configmaps")
    await api.create("configmaps", config_map("a"))
    seen: list[Object] = []

    async def follow() -> None:
        async for event in api.watch("configmaps", resourceVersion=version):
            seen.append(event)

    watching = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    restarting = asyncio.create_task(cluster.restart(down=0.3))
    with pytest.raises(aiohttp.ClientError):
        await watching
    with pytest.raises(aiohttp.ClientError):
        await api.list("configmaps")
    await restarting
    assert await api.names("configmaps") == ["a"]
    await api.create("configmaps", config_map("b"))
    events = await collect(api, resourceVersion=seen[-1]["object"]["metadata"]["resourceVersion"], timeoutSeconds="1")
    assert told(events) == [("ADDED", "b")]


async def test_a_server_that_is_told_to_stop_keeps_its_watches_for_a_while(api: Kubectl, cluster: FakeCluster) -> None:
    version = await api.version("configmaps")
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(collect(api, resourceVersion=version))
    await asyncio.sleep(0.1)
    started = loop.time()
    restarting = asyncio.create_task(cluster.restart(down=0.1, linger=0.5))
    await asyncio.sleep(0.2)
    assert not watching.done()
    async with aiohttp.ClientSession(cluster.url) as stranger:
        with pytest.raises(aiohttp.ClientConnectorError):
            await stranger.get("/readyz")
    with pytest.raises(aiohttp.ClientError):
        await watching
    assert loop.time() - started >= 0.5
    await restarting
    assert await api.names("configmaps") == []


async def test_lost_events_are_in_the_next_list(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("lost-events", name="p")
    version = await api.version()
    await api.create("pods", pod("p"))
    await api.create("pods", pod("q"))
    await api.follow("q", ended)
    await asyncio.sleep(0.1)
    events = await collect(api, "pods", resourceVersion=version, timeoutSeconds="1")
    phases = {
        name: [e["object"]["status"]["phase"] for e in events if e["object"]["metadata"]["name"] == name]
        for name in "pq"
    }
    assert phases["q"][-1] == "Succeeded" and phases["p"][-1] == "Running"
    assert (await api.get("pods", "p"))["status"]["phase"] == "Succeeded"
    (planted,) = cluster.scenarios.of("p")
    assert planted.struck is not None


async def test_late_events_come_late(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.scenarios.attach("late-events", name="p", watch_seconds=25.0)  # half a second on this clock
    await api.create("pods", pod("p"))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        watching = asyncio.create_task(api.follow("p", ended))
        await eventually(lambda: cluster.objects.get(PODS, ("default", "p")).body["status"]["phase"] == "Succeeded")
        done = loop.time()
        await watching
    assert 0.3 < loop.time() - done < 2.0


async def test_a_slow_watch(api: Kubectl, cluster: FakeCluster) -> None:
    cluster.faults.watch_delay = 0.2
    version = await api.version("configmaps")
    for name in ("a", "b"):
        await api.create("configmaps", config_map(name))
    loop = asyncio.get_running_loop()
    started, times = loop.time(), list[float]()
    async for _ in api.watch("configmaps", resourceVersion=version):
        times.append(loop.time() - started)
        if len(times) == 2:
            break
    assert times[0] >= 0.2 and 0.4 <= times[1] < 2.0
