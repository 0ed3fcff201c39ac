"""A fake cluster, and our backend on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.testing.fake_init import FakePod
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image, NodeSpec, ProgramContext
from openforgerl.testing.fake_sandbox import Program
from openforgerl.types import Exit

NAMESPACE = "rollouts"
FAST = Clock(cluster=0.02)
"""Fifty times faster than a real cluster; what objects promise in seconds takes seconds."""

Backend = Callable[..., AbstractAsyncContextManager[KubernetesSandboxes]]


async def says_hello(pod: FakePod, program: Program) -> Exit:
    """Every program prints its last word."""
    del pod
    return Exit(code=0, stdout=program.argv[-1].encode())


async def coroutine_init(context: ProgramContext) -> int:
    return await FakePod(says_hello).run(context)


@pytest.fixture
async def fake() -> AsyncGenerator[FakeCluster]:
    """Image `coroutine:*` is an init without a machine, any other is this machine's system in real processes."""
    images = {"coroutine:*": Image(program=coroutine_init, handles_term=True)}
    nodes = [NodeSpec(name=f"node-{number}") for number in range(2)]
    options = ClusterOptions(nodes=nodes, namespaces=[NAMESPACE], clock=FAST, images=images)
    async with FakeCluster(options) as cluster:
        yield cluster


@pytest.fixture
def backend(fake: FakeCluster, tmp_path: Path) -> Backend:
    """`async with backend(...) as sandboxes`; keywords are `KubernetesOptions`. `state`: of which run folder."""

    @asynccontextmanager
    async def opened(*, token: str = "", state: str = "state", **options: Any) -> AsyncGenerator[KubernetesSandboxes]:
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", token=token, namespace=NAMESPACE)
        chosen = {"image": "coroutine:1", "grace": 1, "lost_node_timeout": 0.5} | options
        settings = KubernetesOptions(kubeconfig=str(kubeconfig), **chosen)
        async with KubernetesSandboxes(SandboxOptions(kubernetes=settings), tmp_path / state) as sandboxes:
            yield sandboxes

    return opened


@pytest.fixture
def served(tmp_path: Path) -> Generator[Path]:
    """Kubeconfig of a fake cluster in a process of its own, twenty times as fast as a real one."""
    path = tmp_path / "kubeconfig"
    words = [
        str(Path(sys.executable).with_name("openforgerl")),
        "testing",
        "fake-kubernetes",
        "--kubeconfig",
        str(path),
        "--namespace",
        "rollouts",
    ]
    server = subprocess.Popen([*words, "--speed", "20"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline().startswith("Fake Kubernetes at")
        yield path
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        server.stdout.close()
