"""A client library that others wrote, lightkube, finds the fake to be a cluster."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from httpx2 import HTTPStatusError
from httpx2.websockets import WebSocketUpgradeError
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.models.core_v1 import (
    ConfigMapVolumeSource,
    Container,
    PodSpec,
    SecurityContext,
    Volume,
    VolumeMount,
)
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, Event, Node, Pod
from lightkube.types import PatchType

from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeCluster]:
    async with FakeCluster(ClusterOptions(clock=Clock(cluster=0.02))) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncGenerator[AsyncClient]:
    async with AsyncClient(config=KubeConfig.from_dict(cluster.kubeconfig())) as client:
        yield client


def a_pod(name: str, *command: str, **metadata: object) -> Pod:
    main = Container(
        name="main",
        image="x:1",
        command=list(command),
        volumeMounts=[VolumeMount(name="c", mountPath="/etc/c")],
        securityContext=SecurityContext(allowPrivilegeEscalation=False),
    )
    spec = PodSpec(
        containers=[main],
        restartPolicy="Never",
        terminationGracePeriodSeconds=0,
        automountServiceAccountToken=False,
        volumes=[Volume(name="c", configMap=ConfigMapVolumeSource(name="c"))],
    )
    return Pod(metadata=ObjectMeta(name=name, labels={"run": "1"}, **metadata), spec=spec)


async def test_a_run_by_lightkube(client: AsyncClient, cluster: FakeCluster) -> None:
    owner = await client.create(ConfigMap(metadata=ObjectMeta(name="c"), data={"word": "hello"}))
    assert owner.metadata is not None and owner.metadata.name and owner.metadata.uid
    reference = OwnerReference(apiVersion="v1", kind="ConfigMap", name=owner.metadata.name, uid=owner.metadata.uid)
    listed = client.list(Pod, labels={"run": "1"})
    assert [one async for one in listed] == []
    phases: list[str] = []
    watching = client.watch(Pod, labels={"run": ["1", "2"]}, resource_version=listed.resourceVersion)
    await client.create(a_pod("p", "/bin/sh", "-c", "cat /etc/c/word; echo; exit 3", ownerReferences=[reference]))
    async with asyncio.timeout(10), aclosing(watching):
        async for kind, pod in watching:
            assert kind in ("ADDED", "MODIFIED") and pod.status is not None
            phases.append(str(pod.status.phase))
            if phases[-1] in ("Succeeded", "Failed"):
                break
    assert list(dict.fromkeys(phases)) == ["Pending", "Running", "Failed"]
    assert pod.status.containerStatuses and pod.status.containerStatuses[0].state is not None
    terminated = pod.status.containerStatuses[0].state.terminated
    assert terminated is not None and (terminated.exitCode, terminated.reason) == (3, "Error")
    assert terminated.finishedAt is not None and terminated.finishedAt.tzinfo is not None
    assert [line async for line in client.log("p")] == ["hello\n"]
    events = [one.reason async for one in client.list(Event, fields={"involvedObject.name": "p"})]
    assert "Scheduled" in events
    assert [node.metadata.name async for node in client.list(Node) if node.metadata] == ["node-0"]
    await client.delete(ConfigMap, "c")
    async with asyncio.timeout(10):
        while [one async for one in client.list(Pod)]:  # noqa: ASYNC110 - the collector is what is waited for
            await asyncio.sleep(0.02)


async def test_exec_by_lightkube(client: AsyncClient) -> None:
    await client.create(ConfigMap(metadata=ObjectMeta(name="c")))
    await client.create(a_pod("p", "/bin/sh", "-c", "sleep 60"))
    await client.wait(Pod, "p", for_conditions=["Ready"])
    answer = await client.exec(
        "p", command=["sh", "-c", "cat; echo bad >&2; exit 4"], stdin="in", stdout=True, stderr=True
    )
    assert (answer.stdout, answer.stderr, answer.exit_code) == ("in", "bad\n", 4)
    data = bytes(range(256)) * 4096
    out = io.BytesIO()
    answer = await client.exec("p", command="cat", stdin=data, stdout=out)
    assert answer.exit_code == 0 and out.getvalue() == data
    with pytest.raises(WebSocketUpgradeError, match="404"):
        await client.exec("nobody", command="true")


async def test_errors_are_lightkube_s(client: AsyncClient, cluster: FakeCluster) -> None:
    await client.create(ConfigMap(metadata=ObjectMeta(name="c")))
    with pytest.raises(ApiError) as refused:
        await client.create(ConfigMap(metadata=ObjectMeta(name="c")))
    assert refused.value.status.reason == "AlreadyExists"
    with pytest.raises(ApiError) as refused:
        await client.get(Pod, "nobody")
    assert refused.value.status.code == 404
    old = await client.get(ConfigMap, "c")
    await client.patch(ConfigMap, "c", {"data": {"a": "1"}}, patch_type=PatchType.MERGE)
    with pytest.raises(ApiError) as refused:
        await client.replace(old)
    assert refused.value.status.reason == "Conflict"
    applied = Lease(metadata=ObjectMeta(name="run", labels={"x": "y"}))
    for _ in range(2):
        lease = await client.apply(applied, field_manager="test")
    assert lease.metadata is not None and lease.metadata.labels == {"x": "y"}
    version = client.list(ConfigMap)
    assert len([one async for one in version]) == 1
    await client.patch(ConfigMap, "c", {"data": {"a": "2"}}, patch_type=PatchType.MERGE)
    cluster.compact()
    with pytest.raises(ApiError) as refused:
        async for _ in client.watch(ConfigMap, resource_version=version.resourceVersion):
            raise AssertionError("an event from a version that is gone")
    assert refused.value.status.code == 410
    everything = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    user = KubeConfig.from_dict(cluster.kubeconfig(token=cluster.access.add("user", everything)))
    cluster.faults.throttle_rate = 1.0
    async with AsyncClient(config=user) as throttled:
        with pytest.raises(HTTPStatusError, match="429"):  # the text body is no Status
            await throttled.get(ConfigMap, "c")
