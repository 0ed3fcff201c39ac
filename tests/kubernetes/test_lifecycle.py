"""What is said of a pod's way to its init: by hand-made news, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from openforgerl.rollout import attempt
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.kubernetes.access import Access
from openforgerl.sandboxes.kubernetes.gateway import Gateway
from openforgerl.sandboxes.kubernetes.holding import RunHold
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.lifecycle import Facility, PodLife
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.kubernetes.pace import Room
from openforgerl.sandboxes.kubernetes.sites import Site, Sites
from openforgerl.sandboxes.kubernetes.watching import PodWatch

BASE: dict[str, Any] = {"metadata": {"name": "p", "uid": "u", "annotations": {}}, "spec": {}}
UNPLACED = BASE | {"status": {"phase": "Pending"}}
PLACED = {"type": "PodScheduled", "status": "True"}


def waits(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason}}
    statuses = [{"name": "rollout", "ready": False, "state": state}]
    return BASE | {"status": {"phase": "Pending", "conditions": [PLACED], "containerStatuses": statuses}}


@pytest.fixture
async def gateway() -> AsyncGenerator[Gateway]:
    opened = Gateway("127.0.0.1", 0)
    await opened.start()
    yield opened
    await opened.close()


def life_of(gateway: Gateway) -> PodLife:
    async def nobody() -> None:
        return None

    access = Access(server="http://127.0.0.1:1", namespace="n", source="test", tls=None, token=nobody)
    cluster, options = HttpCluster(access), KubernetesOptions(image="i")
    site = Site(cluster, RunHold(cluster, "r", 60, "h"), PodWatch(cluster, "a=b", relist_seconds=300))
    facility = Facility(Sites([cluster], "r", "h", options), gateway, options)
    return PodLife(facility, site, "p", Credentials(b"k", "p", "n"))


@pytest.mark.parametrize(
    "reasons",
    [("ErrImagePull",), ("ErrImagePull", "ContainerCreating"), ("ContainerCreating", "ImagePullBackOff")],
    ids=["pull", "pull-then-start", "start-then-pull"],
)
async def test_a_pull_is_not_counted_as_scheduling(gateway: Gateway, reasons: tuple[str, ...]) -> None:
    """The watch may miss that the pod had a node before its first pull failed."""
    life = life_of(gateway)
    boarding = asyncio.create_task(life.rejoin(UNPLACED))
    await asyncio.sleep(0.2)
    for reason in reasons:
        life.news.pod = waits(reason)
        life.news.tell()
        await asyncio.sleep(0.4)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = (
        f"GET /v1/pods/p HTTP/1.1\r\nUpgrade: openforgerl-sandbox\r\nAuthorization: Bearer {life.credentials.token()}"
    )
    writer.write(f"{head}\r\n\r\n".encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    _, theirs = await boarding
    pulled = 0.4 * len(reasons)
    assert 0.15 < life.seconds["schedule"] < 0.35
    assert pulled - 0.05 < life.seconds["pull_and_start"] < pulled + 0.3
    life._watching.cancel()  # type: ignore[union-attr]
    theirs.transport.abort()
    writer.transport.abort()


async def test_who_waits_for_room_is_woken_one_by_one_and_verifiers_first() -> None:
    room, woken = Room(), list[str]()

    async def wait(name: str, seconds: float = 5.0) -> None:
        begun = asyncio.get_running_loop().time()
        await room.wait(seconds, first=name.startswith("verifier"))
        woken.append(name if asyncio.get_running_loop().time() - begun < seconds else f"{name} in vain")

    tasks = [asyncio.create_task(wait(name)) for name in ("agent-1", "agent-2", "verifier-1", "verifier-2")]
    tasks.append(asyncio.create_task(wait("verifier-3", 0.1)))
    await asyncio.sleep(0.2)
    assert woken == ["verifier-3 in vain"]
    tasks[2].cancel()
    for _ in range(3):
        room.freed()
        await asyncio.sleep(0.01)
    room.freed()  # nobody waits: it is not kept for later
    assert woken[1:] == ["verifier-2", "agent-1", "agent-2"]
    await asyncio.wait(tasks)


async def test_a_verifier_that_finds_no_room_gets_that_of_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents in all the room there is, each waiting for its verifier's: whoever waits long gives the agent's up."""
    released = asyncio.Event()

    async def release() -> None:
        released.set()

    monkeypatch.setattr(attempt, "PATIENCE", 0.05)
    async with attempt._making_room(release):
        pass
    await asyncio.sleep(0.1)
    assert not released.is_set()  # there was room, and the agent's sandbox stays
    async with attempt._making_room(release), asyncio.timeout(2):
        await released.wait()
