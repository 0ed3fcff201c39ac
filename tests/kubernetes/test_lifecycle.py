"""What is said of a pod's way to its init: by hand-made news, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, cast

import pytest

from openforgerl.rollout import attempt
from openforgerl.sandboxes.channel import Channel
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.kubernetes.access import Access
from openforgerl.sandboxes.kubernetes.gateway import Gateway, Stream
from openforgerl.sandboxes.kubernetes.holding import RunHold
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.lifecycle import Facility, PodLife
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.kubernetes.pace import Room
from openforgerl.sandboxes.kubernetes.sites import Site, Sites
from openforgerl.sandboxes.kubernetes.vessel import PodVessel
from openforgerl.sandboxes.kubernetes.watching import PodWatch
from openforgerl.types import SandboxRef

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


@pytest.fixture
async def life(gateway: Gateway) -> AsyncGenerator[PodLife]:
    """A pod's on an API server that does not answer."""

    async def nobody() -> None:
        return None

    access = Access(server="http://127.0.0.1:1", namespace="n", source="test", tls=None, token=nobody)
    cluster, options = HttpCluster(access), KubernetesOptions(image="i")
    site = Site(cluster, RunHold(cluster, "r", 60, "h"), PodWatch(cluster, "a=b", relist_seconds=300))
    facility = Facility(Sites([cluster], "r", "h", options), gateway, options)
    yield PodLife(facility, site, "p", Credentials(b"k", "p", "n"))
    await cluster.close()


async def dialled(gateway: Gateway, life: PodLife) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As the pod's init, admitted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    token = life.credentials.token()
    head = f"GET /v1/pods/p HTTP/1.1\r\nUpgrade: openforgerl-sandbox\r\nAuthorization: Bearer {token}"
    writer.write(f"{head}\r\n\r\n".encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def cut_off(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends it, at once."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 5) == b""
    return True


@contextlib.asynccontextmanager
async def ending(work: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """While it begins; it would try for seconds to reach the API server."""
    task = asyncio.create_task(work)
    yield
    task.cancel()
    await asyncio.wait([task])


async def test_a_connection_that_nobody_took_goes_with_its_pod(gateway: Gateway, life: PodLife) -> None:
    """An attempt may be stopped when its init has just dialled in."""
    boarding = asyncio.create_task(life.rejoin(UNPLACED))
    await asyncio.sleep(0.05)
    reader, writer = await dialled(gateway, life)
    await boarding
    async with ending(life.remove(0.1)):
        assert await cut_off(reader)
    writer.transport.abort()


class _Joining:
    """A channel that has not made up its mind about a stream."""

    async def rejoin(self, *stream: object) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("turns", range(4))
async def test_an_init_that_dials_again_at_the_end_is_cut_off(gateway: Gateway, life: PodLife, turns: int) -> None:
    boarding = asyncio.create_task(life.rejoin(UNPLACED))
    await asyncio.sleep(0.05)
    _, first = await dialled(gateway, life)
    await boarding
    ref = SandboxRef(backend="kubernetes", run_id="r", attempt_id="a")
    vessel = PodVessel(ref, life, cast(Channel, _Joining()), 0.1)
    arrived = asyncio.Event()
    take = life.on_stream
    assert take is not None

    def taking(stream: Stream) -> None:
        take(stream)
        arrived.set()

    life.on_stream = taking
    reader, second = await dialled(gateway, life)
    await arrived.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with ending(vessel.destroy()):
        assert await cut_off(reader)
    first.transport.abort()
    second.transport.abort()


@pytest.mark.parametrize(
    "reasons",
    [("ErrImagePull",), ("ErrImagePull", "ContainerCreating"), ("ContainerCreating", "ImagePullBackOff")],
    ids=["pull", "pull-then-start", "start-then-pull"],
)
async def test_a_pull_is_not_counted_as_scheduling(gateway: Gateway, life: PodLife, reasons: tuple[str, ...]) -> None:
    """The watch may miss that the pod had a node before its first pull failed."""
    begun = time.monotonic()
    boarding = asyncio.create_task(life.rejoin(UNPLACED))
    await asyncio.sleep(0.2)
    placed = 0.0
    for reason in reasons:
        life.news.pod = waits(reason)
        life.news.tell()
        await asyncio.sleep(0.4)
        placed = placed or time.monotonic() - begun
    _, writer = await dialled(gateway, life)
    _, theirs = await boarding
    whole = time.monotonic() - begun
    # By this test's own clock, however busy the machine is: what is left of the whole was not scheduling.
    assert 0.19 < life.seconds["schedule"] < placed - 0.3
    assert 0.39 * len(reasons) < life.seconds["pull_and_start"] < whole - 0.19
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
