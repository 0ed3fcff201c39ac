"""The contract of sandboxes, held against pods: on the fake cluster, and on a real one when KUBECONFIG is given.

A real cluster takes its image from OPENFORGERL_TEST_IMAGE (with /usr/bin/python3, GNU grep and coreutils) and its
namespace from the kubeconfig's context; its nodes must reach this machine at OPENFORGERL_TEST_GATEWAY (an address;
empty: the one that faces the API server). `pytest tests/kubernetes/test_contract.py -m cluster`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from openforgerl.protocols import Sandbox, Sandboxes
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.kubernetes import names
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.cluster import POD, selector
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.testing.contracts.case import Case, told
from openforgerl.testing.contracts.sandboxes import CHECKS
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, networks
from openforgerl.types import SandboxLimits, SandboxSpec

RUN = f"contract-{os.getpid()}"
SPEC = SandboxSpec(run_id=RUN, limits=SandboxLimits(memory_mb=512, processes=100, disk_mb=64))

ELSEWHERE = {
    "only_the_endpoint_is_reachable": "a NetworkPolicy's work (tests/kubernetes/test_deploy.py reads the policies)",
    "the_agent_is_nobody_special": "an emptyDir belongs to root and lets everybody write; see the test below",
}
"""Checks that do not fit pods, and why."""
NOT_ON_THE_FAKE = {
    "two_do_not_see_each_other": "its pods share this machine's network, and with it abstract sockets",
    "memory_is_bounded_and_said": "it shows no cgroup inside, by whose counter init tells an OOM from any other kill",
    "processes_are_bounded": "started by root its containers are root outside, whom RLIMIT_NPROC does not bind",
    "init_cannot_be_harmed": "for the same reason /proc lists the names of init's descriptors to them",
}
NOT_ON_A_CLUSTER = {
    "layers_are_read_only_and_scratch_is_not": "the layer is a directory of this machine, which no node has",
}


def chosen(*without: dict[str, str]) -> list[str]:
    left_out = {name for names in (ELSEWHERE, *without) for name in names}
    assert left_out <= set(CHECKS)
    return [name for name in CHECKS if name not in left_out]


def case_of(options: SandboxOptions, folder: Path, opened: list[KubernetesSandboxes]) -> Case:
    heirs: list[Any] = []

    def fresh() -> Sandboxes:
        opened.append(KubernetesSandboxes(options, folder / "state"))
        return opened[-1]

    async def leftovers() -> list[str]:
        cluster = await opened[-1]._connect()
        pods = (await cluster.list(POD, labels=selector(names.run_labels(RUN)))).items
        return [str(pod["metadata"]["name"]) for pod in pods]

    async def murder(sandbox: Sandbox) -> None:
        cluster = await opened[-1]._connect()
        await cluster.delete(POD, str(sandbox.ref.detail["pod"]), uid="", grace=0)

    async def adopt(backend: Sandboxes, sandbox: Sandbox) -> Sandbox:
        assert isinstance(backend, KubernetesSandboxes)
        for old in opened:
            if old is not backend and old._gateway is not None:
                await old._gateway.close()  # its process is gone, and so is its end of every connection
        sandbox._channel._writer.transport.abort()  # type: ignore[attr-defined]
        heirs.append(backend.adopt(sandbox.ref, SPEC))  # kept: collected, it would close what it has opened
        return await heirs[-1].__aenter__()

    (folder / "own").mkdir()
    return Case(
        open=fresh,
        spec=SPEC,
        folder=folder / "own",
        leftovers=leftovers,
        murder=murder,
        adopt=adopt,
        names={"backend": "kubernetes"},
    )


@pytest.fixture
async def fake_case(fake: FakeCluster, tmp_path: Path) -> AsyncGenerator[Case]:
    kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
    settings: dict[str, Any] = {"image": "system:1", "grace": 1, "layers": "host", "user_namespaces": True}
    options = SandboxOptions(kubernetes=KubernetesOptions(kubeconfig=str(kubeconfig), **settings))
    opened: list[KubernetesSandboxes] = []
    case = case_of(options, tmp_path, opened)

    async def murder(sandbox: Sandbox) -> None:
        (life,) = [one for one in fake.kubelet.lives.values() if one.uid == sandbox.ref.detail["uid"]]
        (slot,) = life.slots
        assert slot.container is not None
        os.kill(slot.container.pid, signal.SIGKILL)

    yield dataclasses.replace(case, murder=murder)
    for backend in opened:
        await backend.close()
    await fake.settled()
    assert fake.kubelet.lives == {}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", chosen(NOT_ON_THE_FAKE))
async def test_on_the_fake_cluster(name: str, fake_case: Case) -> None:
    await CHECKS[name](fake_case)


LACKING = networks.lacking()


@pytest.mark.sandbox
@pytest.mark.skipif(bool(LACKING), reason=LACKING or "it can be had")
@pytest.mark.parametrize("name", [name for name in NOT_ON_THE_FAKE if name != "memory_is_bounded_and_said"])
async def test_on_the_fake_cluster_with_a_network_and_a_user_for_each_pod(name: str, tmp_path: Path) -> None:
    options = ClusterOptions(network="own", clock=Clock(cluster=0.02), namespaces=["rollouts"])
    async with FakeCluster(options) as cluster:
        assert cluster.network is not None
        kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        settings = {"image": "system:1", "grace": 1, "user_namespaces": True, "gateway_host": cluster.network.node}
        opened: list[KubernetesSandboxes] = []
        chosen = KubernetesOptions(kubeconfig=str(kubeconfig), **settings)
        try:
            await CHECKS[name](case_of(SandboxOptions(kubernetes=chosen), tmp_path, opened))
        finally:
            for backend in opened:
                await backend.close()


@pytest.mark.sandbox
async def test_the_agent_of_a_pod_is_nobody_special(fake_case: Case) -> None:
    async with fake_case.open().create(SPEC, "a-1") as sandbox:
        assert await told(sandbox, "id -u; id -g; pwd; touch x ~/x && echo ok") == "1000\n1000\n/workspace\nok\n"
        status = await told(sandbox, "grep -E 'CapEff|CapPrm|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status")
        assert [line.split()[1] for line in status.splitlines()] == ["0" * 16, "0" * 16, "0" * 16, "1", "2"]


@pytest.fixture
async def cluster_case(tmp_path: Path) -> AsyncGenerator[Case]:
    image = os.environ.get("OPENFORGERL_TEST_IMAGE", "")
    if not os.environ.get("KUBECONFIG") or not image:
        pytest.fail("set KUBECONFIG and OPENFORGERL_TEST_IMAGE")
    gateway = os.environ.get("OPENFORGERL_TEST_GATEWAY", "")
    options = SandboxOptions(kubernetes=KubernetesOptions(image=image, gateway_host=gateway, layers="present"))
    opened: list[KubernetesSandboxes] = []
    yield case_of(options, tmp_path, opened)
    for backend in opened:
        await backend.close()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(NOT_ON_A_CLUSTER))
async def test_on_a_real_cluster(name: str, cluster_case: Case) -> None:
    await CHECKS[name](cluster_case)
