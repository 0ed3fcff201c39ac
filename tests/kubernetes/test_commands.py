"""`openforgerl doctor --kubernetes` and `openforgerl reap`, on the fake cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforgerl.sandboxes import SandboxOptions
from openforgerl.sandboxes.kubernetes import names
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.store import Database, RunStore
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, QUOTAS, RESOURCES
from openforgerl.types import SandboxSpec

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
POLICIES = next(resource for resource in RESOURCES if resource.plural == "networkpolicies")
Command = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def command(fake: FakeCluster, tmp_path: Path) -> Command:
    """Exit code and output of `openforgerl WORDS` in a process of its own, which has the cluster's kubeconfig."""

    async def ran(*words: object, token: str = "") -> tuple[int, str]:
        kubeconfig = fake.write_kubeconfig(tmp_path / "kubeconfig", token=token, namespace="rollouts")
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("openforgerl")),
            *map(str, words),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    return ran


def found(out: str) -> dict[str, str]:
    """Check → its mark."""
    lines = [line for line in out.splitlines() if line and not line.startswith(" ")]
    return {line[:22].strip(): line[23:31].strip() for line in lines}


SETTINGS = ("-s", "sandbox.kubernetes.image=system:1", "-s", "sandbox.kubernetes.grace=1")


async def test_doctor_on_a_cluster_that_has_everything(fake: FakeCluster, command: Command) -> None:
    fake.registry.create(QUOTAS, "rollouts", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "50"}}})
    for policy in yaml.safe_load_all((DEPLOY / "network.yaml").read_text()):
        fake.registry.create(POLICIES, "rollouts", policy)
    code, out = await command("doctor", "--kubernetes", *SETTINGS)
    assert code == 0, out
    marks = found(out)
    wanted = ("cluster access", "API server", "rights", "sandbox pod", "quota", "network policy", "a sandbox")
    assert [marks[check] for check in wanted] == ["ok"] * len(wanted), out
    assert "openforgerl-rollouts-nothing" in out
    await fake.settled()
    assert fake.objects.list(PODS) == []


async def test_doctor_names_what_is_missing_and_how_to_get_it(fake: FakeCluster, command: Command) -> None:
    rules = [rule for rule in _rules() if rule["resources"] != ["leases"]]
    token = fake.access.add("somebody", rules, namespace="rollouts")
    code, out = await command("doctor", "--kubernetes", token=token)
    assert code == 1
    marks = found(out)
    assert marks["right on leases"] == "MISSING" and "may not create, get, list, patch, delete" in out
    assert marks["sandbox pod"] == "MISSING" and "sandbox.kubernetes.image is empty" in out
    assert marks["network policy"] == "weaker"
    assert "a sandbox" not in marks  # nothing was started
    assert "rbac.yaml" in out


async def test_doctor_sees_a_full_quota_and_a_pod_that_nobody_can_run(fake: FakeCluster, command: Command) -> None:
    fake.registry.create(QUOTAS, "rollouts", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
    code, out = await command("doctor", "--kubernetes", *SETTINGS)
    assert code == 1 and "exceeded quota" in out and "would wait for room" in out


async def test_doctor_looks_at_every_namespace(fake: FakeCluster, command: Command) -> None:
    fake.registry.create(NAMESPACES, "", {"metadata": {"name": "more"}, "status": {"phase": "Active"}})
    fake.registry.create(QUOTAS, "more", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "7"}}})
    words = ("doctor", "--kubernetes", *SETTINGS, "-s", 'sandbox.kubernetes.more_namespaces=["more"]')
    code, out = await command(*words)
    assert code == 0, out
    assert "needs in namespace rollouts" in out and "needs in namespace more" in out
    assert "none in rollouts" in out and "small: pods 0/7 in more" in out
    token = fake.access.add("somebody", _rules(), namespace="rollouts")
    code, out = await command(*words, token=token)
    assert code == 1 and "may not create, get, list, watch, delete, deletecollection in namespace more" in out
    assert "a sandbox" not in found(out) and "deploy/kubernetes" in out


async def test_doctor_where_nobody_listens(fake: FakeCluster, command: Command) -> None:
    await fake.stop_serving()
    code, out = await command("doctor", "--kubernetes", *SETTINGS)
    assert code == 1 and found(out)["API server"] == "MISSING"
    await fake._listen()


def _rules() -> list[dict[str, Any]]:
    role = next(one for one in yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text()) if one["kind"] == "Role")
    rules: list[dict[str, Any]] = role["rules"]
    return rules


@asynccontextmanager
async def left_behind(folder: Path, kubeconfig: Path) -> AsyncGenerator[None]:
    """A run folder whose process, so far as anybody else can see, died with a pod running."""
    folder.mkdir()
    settings = {"kubeconfig": str(kubeconfig), "image": "system:1", "grace": 1}
    config: Any = {"backend": "kubernetes", "sandbox": {"kubernetes": settings}}
    database = Database.open(folder / "run.sqlite")
    await RunStore(database).put_run("run-1", "digest", config)
    await database.close()
    options = SandboxOptions(kubernetes=KubernetesOptions(**settings))
    spec = SandboxSpec(run_id="run-1")
    async with KubernetesSandboxes(options, folder / "sandboxes") as backend, backend.create(spec, "t-r0-a1"):
        yield


async def test_reap_a_run_folder(fake: FakeCluster, command: Command, tmp_path: Path) -> None:
    kubeconfig, folder = fake.write_kubeconfig(tmp_path / "config", namespace="rollouts"), tmp_path / "run"
    async with left_behind(folder, kubeconfig):
        assert await command("reap", folder, "--list") == (0, f"{folder}: 1 sandboxes\n")
        code, out = await command("reap", "--expired", "--list")
        assert code == 0 and "left alone" in out  # its owner, this process, still renews its Lease
        assert await command("reap", folder) == (0, f"{folder}: 1 sandboxes destroyed\n")
        assert fake.objects.list(PODS) == []
        assert await command("reap", "--expired") == (0, "no run has anything in namespace rollouts\n")


async def test_reap_looks_through_every_namespace(fake: FakeCluster, command: Command) -> None:
    """Of two runs whose owners are dead each has pods in one of the namespaces."""
    fake.registry.create(NAMESPACES, "", {"metadata": {"name": "more"}, "status": {"phase": "Active"}})
    for namespace in ("rollouts", "more"):
        labels = names.pod_labels(f"run-{namespace}", "t-r0-a1", network=False)
        metadata = {"name": "p", "labels": labels, "annotations": {names.RUN_NOTE: f"run-{namespace}"}}
        spec = {"containers": [{"name": "c", "image": "coroutine:1"}], "restartPolicy": "Never"}
        fake.registry.create(PODS, namespace, {"metadata": metadata, "spec": spec | {"nodeSelector": {"no": "where"}}})
    words = ("reap", "--expired", *SETTINGS)
    code, out = await command(*words, "--list")
    assert (code, out) == (0, "run-rollouts: 1 pods, owner dead\n")
    code, out = await command(*words, "-s", 'sandbox.kubernetes.more_namespaces=["more"]')
    assert (code, out.splitlines()) == (
        0,
        ["run-rollouts: 1 pods destroyed in namespace rollouts", "run-more: 1 pods destroyed in namespace more"],
    )
    assert fake.objects.list(PODS) == []


async def test_a_run_that_is_being_worked_on_is_not_reaped(fake: FakeCluster, command: Command, tmp_path: Path) -> None:
    kubeconfig, folder = fake.write_kubeconfig(tmp_path / "config", namespace="rollouts"), tmp_path / "run"
    async with left_behind(folder, kubeconfig):
        database = Database.open(folder / "run.sqlite")
        code, out = await command("reap", folder)
        assert code == 1 and "being written by another process" in out
        assert len(fake.objects.list(PODS)) == 1
        await database.close()


async def test_reap_says_what_it_needs(command: Command, tmp_path: Path) -> None:
    code, out = await command("reap")
    assert code == 2 and "--expired" in out
    (tmp_path / "empty").mkdir()
    code, out = await command("reap", tmp_path / "empty")
    assert code == 2 and "no run.sqlite" in out
