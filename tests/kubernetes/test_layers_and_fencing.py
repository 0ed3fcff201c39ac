"""How harness layers get into a pod, and what becomes of a pod that nobody can kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import StageError
from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.testing.contracts.case import told
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, Image
from openforgerl.testing.fake_kubernetes.processes import host_image
from openforgerl.types import Layer, SandboxSpec

LOOK = "cat /opt/tool/bin/tool; touch /opt/tool/x 2>/dev/null || echo read-only"


@pytest.mark.sandbox
@pytest.mark.parametrize("layers", ["copy", "volume", "present", "host"])
async def test_a_layer_arrives_and_cannot_be_changed(tmp_path: Path, layers: Any) -> None:
    tool = tmp_path / "tool"
    (tool / "bin").mkdir(parents=True)
    (tool / "bin" / "tool").write_text("a tool\n")
    for folder in (tmp_path, tool, tool / "bin"):
        folder.chmod(0o755)
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    (image / "opt" / "tool").symlink_to(tool)
    root = {**host_image(), "/opt/tool": str(tool)}
    root.pop("/opt", None)
    options = ClusterOptions(
        clock=Clock(cluster=0.02),
        namespaces=["rollouts"],
        images={"with-tool:*": Image(root=root)},
        volume_images={"with-tool:1": image},
    )
    async with FakeCluster(options) as fake:
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", namespace="rollouts")
        settings = KubernetesOptions(
            kubeconfig=str(kubeconfig),
            image="with-tool:1" if layers == "present" else "system:1",
            layers=layers,
            layer_images={"/opt/tool": "with-tool:1"},
            grace=1,
        )
        spec = SandboxSpec(run_id="run-1", layers=(Layer(source=str(tool), target="/opt/tool"),))
        async with (
            KubernetesSandboxes(SandboxOptions(kubernetes=settings), tmp_path / "state") as sandboxes,
            sandboxes.create(spec, "t-r0-a1") as sandbox,
        ):
            assert await told(sandbox, LOOK) == "a tool\nread-only\n"
        await fake.settled()


@pytest.mark.sandbox
async def test_a_zombie_on_a_lost_node_ends_by_itself(fake: FakeCluster, backend: Any) -> None:
    """Its kubelet is gone, so nobody kills it: it finds the gateway closed to it, and its program ends with it."""
    fake.scenarios.attach("node-lost", after=20.0)
    async with backend(image="system:1") as sandboxes:
        with pytest.raises(StageError, match="out of reach"):
            async with sandboxes.create(SandboxSpec(run_id="run-1"), "t-r0-a1") as sandbox:
                (life,) = fake.kubelet.lives.values()
                (slot,) = life.slots
                assert slot.container is not None
                pid = slot.container.pid
                await sandbox.exec(["/bin/sleep", "60"], env={}, timeout=60)
        async with asyncio.timeout(10):
            while Path(f"/proc/{pid}").exists():
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.05))])
        assert sandboxes._gateway is not None and sandboxes._gateway.refused > 0
    fake.restore_nodes()
    await fake.settled()
