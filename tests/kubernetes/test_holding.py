"""Whose a run is: ConfigMap and Lease under the hands of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import StoreError
from openforgerl.sandboxes.kubernetes import holding, manifests, names
from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, LEASE, ClusterError, Object
from openforgerl.sandboxes.kubernetes.holding import RunHold, free_lease
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.testing.fake_kubernetes import FakeCluster

RUN, NAME = "run-1", names.run_object("run-1")
HERE, THERE, OTHER = "host-1/folder", "host-2/folder", "host-2/another"


@pytest.fixture
async def cluster(fake: FakeCluster, tmp_path: Path) -> AsyncGenerator[HttpCluster]:
    kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
    opened = HttpCluster(find_access(str(kubeconfig), "", {}), first_pause=0.01)
    yield opened
    await opened.close()


async def left_behind(cluster: HttpCluster, home: str, seconds: int) -> Object:
    """The Lease of a process that died just now."""
    hold = RunHold(cluster, RUN, seconds, home)
    await hold.take()
    await hold._stop()
    return await cluster.get(LEASE, NAME)


async def renewed_every(cluster: HttpCluster, pause: float) -> None:
    """What a living process elsewhere does."""
    while True:
        await asyncio.sleep(pause)
        change = {"spec": {"renewTime": manifests.micro_time(time.time()), "holderIdentity": "elsewhere-7"}}
        await cluster.patch(LEASE, NAME, change)


@pytest.mark.parametrize(
    ("home", "least", "most"),
    [(HERE, 0.0, 1.9), (THERE, 1.9, 3.9), (OTHER, 3.9, 10.0)],
    ids=["the-same-folder", "its-copy-on-another-machine", "another-folder"],
)
async def test_how_long_a_dead_ones_lease_holds(cluster: HttpCluster, home: str, least: float, most: float) -> None:
    before = await left_behind(cluster, HERE, 4)
    hold, begun = RunHold(cluster, RUN, 4, home), time.monotonic()
    await hold.take()
    assert least <= time.monotonic() - begun < most
    after = await cluster.get(LEASE, NAME)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["annotations"][names.HOME_NOTE] == home
    assert (await cluster.get(CONFIG_MAP, NAME))["metadata"]["uid"] == hold.owner["metadata"]["uid"]
    await hold.release()


@pytest.mark.parametrize("home", [THERE, OTHER])
async def test_a_living_one_elsewhere_is_seen_by_its_renewals(cluster: HttpCluster, home: str) -> None:
    await left_behind(cluster, HERE, 3)
    living = asyncio.create_task(renewed_every(cluster, 1.0))
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"elsewhere-7.* in namespace rollouts"):
        await free_lease(cluster, RUN, home)
    assert time.monotonic() - begun < 2.5
    hold = RunHold(cluster, RUN, 3, home)
    with pytest.raises(StoreError, match="another process"):
        await hold.take()
    await hold.abandon()
    living.cancel()
    await asyncio.wait([living])
    assert (await cluster.get(LEASE, NAME))["spec"]["holderIdentity"] == "elsewhere-7"
    assert await cluster.get(CONFIG_MAP, NAME)  # the living one's pods hang on it


async def test_clocks_that_differ_are_looked_through(cluster: HttpCluster) -> None:
    """The dead one's clock was an hour ahead: its Lease does not look overdue for an hour."""
    await left_behind(cluster, HERE, 1)
    await cluster.patch(LEASE, NAME, {"spec": {"renewTime": manifests.micro_time(time.time() + 3600)}})
    begun = time.monotonic()
    assert await free_lease(cluster, RUN, OTHER) is not None
    assert 0.9 < time.monotonic() - begun < 3


async def test_of_two_that_take_a_run_over_one_gets_it(cluster: HttpCluster) -> None:
    await left_behind(cluster, HERE, 1)
    holds = [RunHold(cluster, RUN, 1, f"host-{number}/folder-{number}") for number in range(2)]
    for number, hold in enumerate(holds):
        hold._holder = f"holder-{number}"
    done = await asyncio.gather(*(hold.take() for hold in holds), return_exceptions=True)
    assert [type(one) for one in done].count(StoreError) == 1 and done.count(None) == 1, done
    await asyncio.gather(
        *(hold.release() if one is None else hold.abandon() for hold, one in zip(holds, done, strict=True))
    )
    with pytest.raises(ClusterError):
        await cluster.get(LEASE, NAME)


async def test_who_was_taken_over_lets_go_and_deletes_nothing(
    cluster: HttpCluster, caplog: pytest.LogCaptureFixture
) -> None:
    hold = RunHold(cluster, RUN, 1, HERE)
    await hold.take()
    await cluster.patch(LEASE, NAME, {"spec": {"holderIdentity": "elsewhere-7"}})
    await asyncio.sleep(0.8)
    assert "taken over by another process" in caplog.text
    await hold.release()
    assert (await cluster.get(LEASE, NAME))["spec"]["holderIdentity"] == "elsewhere-7"
    assert await cluster.get(CONFIG_MAP, NAME)


async def test_a_lease_that_somebody_deletes_is_made_anew(cluster: HttpCluster) -> None:
    hold = RunHold(cluster, RUN, 1, HERE)
    await hold.take()
    await cluster.delete(LEASE, NAME, uid="")
    await asyncio.sleep(0.8)
    assert (await cluster.get(LEASE, NAME))["metadata"]["annotations"][names.HOME_NOTE] == HERE
    await hold.release()


async def test_an_object_that_comes_and_goes_is_not_asked_for_in_a_loop(
    cluster: HttpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when it is to be made, and not when it is read."""
    asked: list[str] = []

    async def create(self: HttpCluster, kind: Any, manifest: Object, *, dry_run: bool = False) -> Object:
        asked.append("create")
        raise ClusterError("there", status=409, reason="AlreadyExists")

    monkeypatch.setattr(HttpCluster, "create", create)
    monkeypatch.setattr(holding, "_PAUSE", 0.01)
    with pytest.raises(ClusterError, match="does not go"):
        await RunHold(cluster, RUN, 1, HERE).take()
    assert asked == ["create"] * 5


async def test_an_owner_that_is_being_deleted_is_waited_for(cluster: HttpCluster) -> None:
    """In the foreground: it stays until what hangs on it is gone. New pods would be taken with it."""
    made = await cluster.create(CONFIG_MAP, manifests.run_map(RUN, b"init"))
    await cluster.patch(CONFIG_MAP, NAME, {"metadata": {"finalizers": ["test/wait"]}})
    await cluster.delete(CONFIG_MAP, NAME, uid="")
    hold = RunHold(cluster, RUN, 1, HERE)
    taking = asyncio.create_task(hold.take())
    await asyncio.sleep(0.3)
    assert not taking.done()
    await cluster.patch(CONFIG_MAP, NAME, {"metadata": {"finalizers": None}})
    await taking
    assert hold.owner["metadata"]["uid"] != made["metadata"]["uid"]
    await hold.release()
