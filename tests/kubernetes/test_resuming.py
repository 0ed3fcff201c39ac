"""A run that is taken up again: whose it is, what its living pods hang on, and how they are found again."""

from __future__ import annotations

import asyncio
import io
import time
import zipfile
from typing import Any

import pytest

from openforgerl.errors import StageError, StoreError
from openforgerl.sandboxes.kubernetes import backend as backend_module
from openforgerl.sandboxes.kubernetes import manifests
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, ClusterError, Kind, Object
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import CONFIG_MAPS, PODS, RESOURCES
from openforgerl.types import Origin, SandboxSpec

LEASES = next(resource for resource in RESOURCES if resource.plural == "leases")
SPEC = SandboxSpec(run_id="run-1")


def uids(fake: FakeCluster, kind: Any) -> set[str]:
    return {stored.uid for stored in fake.objects.list(kind)}


async def says(sandbox: Any, word: str) -> bytes:
    said: bytes = (await sandbox.exec(["echo", word], env={}, timeout=20)).stdout.strip()
    return said


async def test_an_owner_that_cannot_be_read_is_not_taken_for_absent(
    fake: FakeCluster, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every living pod hangs on it: the garbage collector would take them all."""
    async with backend() as dead, dead.create(SPEC, "t-r0-a1") as living:
        owners, pods = uids(fake, CONFIG_MAPS), uids(fake, PODS)
        get = HttpCluster.get

        async def failing(self: HttpCluster, kind: Kind, name: str) -> Object:
            if kind is CONFIG_MAP:
                raise ClusterError("etcdserver: request timed out (HTTP 500)", status=500)
            return await get(self, kind, name)

        with monkeypatch.context() as patch:
            patch.setattr(HttpCluster, "get", failing)
            async with backend() as heir:
                with pytest.raises(StageError, match="timed out") as failed:
                    async with heir.create(SPEC, "t-r0-a2"):
                        raise AssertionError("it cannot have started")
        assert (failed.value.kind, failed.value.retryable) == ("api_unavailable", True)
        await asyncio.sleep(0.5)
        assert uids(fake, CONFIG_MAPS) == owners and uids(fake, PODS) == pods
        assert await says(living, "x") == b"x"


async def test_another_version_of_our_init_comes_beside_the_first(
    fake: FakeCluster, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade the pods that live keep their owner, and new ones bring the new init."""
    async with backend(image="system:1") as dead, dead.create(SPEC, "t-r0-a1") as old:
        (owner,) = uids(fake, CONFIG_MAPS)
        data = io.BytesIO(manifests.init_bundle())
        with zipfile.ZipFile(data, "a") as archive:
            archive.writestr("inside/upgraded.txt", "yes")
        monkeypatch.setattr(manifests, "init_bundle", data.getvalue)
        async with backend(image="system:1") as heir, heir.create(SPEC, "t-r0-a2") as new:
            assert owner in uids(fake, CONFIG_MAPS) and len(uids(fake, CONFIG_MAPS)) == 2
            await asyncio.sleep(0.5)
            archive = f"{manifests.INIT_HOME}/{manifests.INIT_KEY}"
            look = f"import zipfile; print('inside/upgraded.txt' in zipfile.ZipFile('{archive}').namelist())"
            found = [await one.exec(["/usr/bin/python3", "-c", look], env={}, timeout=20) for one in (old, new)]
            assert [one.stdout for one in found] == [b"False\n", b"True\n"], found
            async with backend(image="system:1") as third, third.create(SPEC, "t-r0-a3") as last:
                assert await says(last, "x") == b"x"
                assert len(uids(fake, CONFIG_MAPS)) == 2
    await fake.settled()
    assert (uids(fake, CONFIG_MAPS), uids(fake, PODS)) == (set(), set())


async def test_a_run_that_another_process_works_on_is_left_alone(fake: FakeCluster, backend: Any) -> None:
    """Run ids come from folders' paths: two machines may have the same, in one namespace."""
    async with backend(lease_seconds=1) as living, living.create(SPEC, "t-r0-a1") as sandbox:
        pods, leases = uids(fake, PODS), uids(fake, LEASES)
        async with backend(state="another", lease_seconds=1) as other:
            with pytest.raises(StageError, match="another process") as failed:
                async with other.create(SPEC, "t-r0-a2"):
                    raise AssertionError("it cannot have started")
            assert (failed.value.kind, failed.value.retryable) == ("run_taken", False)
            assert failed.value.origin is Origin.INFRASTRUCTURE
            with pytest.raises(StoreError, match="another process"):
                await other.reap("run-1")
            with pytest.raises(StoreError, match="another process"):
                await other.reap_others("run-1", {"t-r0-a1"})
        assert (uids(fake, PODS), uids(fake, LEASES)) == (pods, leases)
        assert await says(sandbox, "x") == b"x"


async def test_a_run_whose_owner_is_dead_is_taken_over_when_its_lease_has_run_out(
    fake: FakeCluster, backend: Any
) -> None:
    async with backend(lease_seconds=1) as dead, dead.create(SPEC, "t-r0-a1"):
        for task in asyncio.all_tasks():
            if "_renew" in repr(task.get_coro()):
                task.cancel()
        async with backend(state="another", lease_seconds=1) as other:
            begun = time.monotonic()
            async with other.create(SPEC, "t-r0-a2") as sandbox:
                assert time.monotonic() - begun < 5
                assert await says(sandbox, "x") == b"x"


async def test_a_list_that_is_refused_ends_the_attempt_and_blocks_nobody(fake: FakeCluster, backend: Any) -> None:
    """Rights to create and none to list: no retry will change that."""
    rules = [
        {"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": ["create", "get", "delete"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "patch", "delete"]},
    ]
    token = fake.access.add("half", rules, namespace="rollouts")
    async with asyncio.timeout(20), backend(token=token) as sandboxes:
        with pytest.raises(StageError, match="cannot list resource") as failed:
            async with sandboxes.create(SPEC, "t-r0-a1"):
                raise AssertionError("it cannot have started")
    assert (failed.value.kind, failed.value.retryable) == ("api_refused", False)
    assert (uids(fake, CONFIG_MAPS), uids(fake, LEASES)) == (set(), set())


async def test_an_api_server_that_is_away_is_no_empty_cluster(fake: FakeCluster, backend: Any) -> None:
    async with backend() as sandboxes, sandboxes.create(SPEC, "t-r0-a1"), backend() as heir:
        await fake.stop_serving()
        asked = (heir.list("run-1"), heir.reap("run-1"), heir.reap_others("run-1", {"t-r0-a1"}))
        said = await asyncio.gather(*asked, return_exceptions=True)
        await fake._listen()
        assert [type(one) for one in said] == [StoreError] * 3, said
        assert len(await heir.list("run-1")) == 1


async def test_who_gives_up_while_a_run_is_opened_leaves_no_task_behind(fake: FakeCluster, backend: Any) -> None:
    before = asyncio.all_tasks()
    async with backend() as sandboxes:
        fake.faults.latency = 0.3
        creating = asyncio.create_task(sandboxes.create(SPEC, "t-r0-a1").__aenter__())
        await asyncio.sleep(0.75)  # the ConfigMap is made, and the Lease is not
        creating.cancel()
        await asyncio.wait([creating])
        fake.faults.latency = 0.0
    left = [repr(task) for task in asyncio.all_tasks() - before if "kubernetes/" in repr(task)]
    assert [one for one in left if "testing" not in one] == []
    assert (uids(fake, CONFIG_MAPS), uids(fake, LEASES)) == (set(), set())


@pytest.mark.parametrize("image", ["coroutine:1", "system:1"])
async def test_a_sandbox_whose_adoption_comes_late_is_let_in_at_once(
    fake: FakeCluster, backend: Any, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    """Its turn comes when a place is free, which may be long after strangers are sent away for good."""
    async with backend(reconnect_timeout=3.0, image=image) as dead:
        made = [dead.create(SPEC, f"t-r{number}-a1") for number in range(2)]
        refs = [(await one.__aenter__()).ref for one in made]
        await dead._gateway.close()
        monkeypatch.setattr(backend_module, "_SETTLE", 0.3)
        async with backend(reconnect_timeout=3.0, image=image) as heir:
            assert await heir.reap_others("run-1", {ref.attempt_id for ref in refs}) == 0
            for one in made:
                (await _writer(one)).transport.abort()  # as the death of the first process does
            async with heir.adopt(refs[0], SPEC) as first:
                assert await says(first, "x") == b"x"
                await asyncio.sleep(4.0)  # beyond the patience of an init that nobody lets in
                async with heir.adopt(refs[1], SPEC) as second:
                    assert await says(second, "y") == b"y"
        for one in made:
            await one.__aexit__(None, None, None)
    await fake.settled()


async def _writer(creating: Any) -> asyncio.StreamWriter:
    sandbox = creating.gen.ag_frame.f_locals["sandbox"]
    found: asyncio.StreamWriter = sandbox._channel._writer
    return found
