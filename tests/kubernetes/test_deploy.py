"""The manifests in `deploy/`: whole, consistent with each other, and granting what a run asks for and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforgerl.config import load_config
from openforgerl.config.schema import RoomsConfig
from openforgerl.errors import StageError
from openforgerl.orchestrator import RunOptions
from openforgerl.sandboxes.kubernetes import names
from openforgerl.sandboxes.kubernetes.cluster import LEASE, POD
from openforgerl.sandboxes.kubernetes.diagnosis import RIGHTS
from openforgerl.sandboxes.kubernetes.reaping import reap_expired
from openforgerl.sandboxes.kubernetes.runs import find_runs, reap_run
from openforgerl.testing.fake_kubernetes import FakeCluster
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, PODS, POLICIES, QUOTAS
from openforgerl.types import SandboxSpec

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
Object = dict[str, Any]


def documents(folder: str) -> list[Object]:
    """Every object that a kustomization names."""
    kustomization = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
    texts = [(DEPLOY / folder / name).read_text() for name in kustomization["resources"]]
    return [document for text in texts for document in yaml.safe_load_all(text)]


ALL = [(folder, document) for folder in ("base", "more", "proxy") for document in documents(folder)]
REQUIRED = {
    "Deployment": ("selector", "template"),
    "Job": ("template",),
    "NetworkPolicy": ("podSelector", "policyTypes"),
    "PersistentVolumeClaim": ("accessModes", "resources"),
    "ResourceQuota": ("hard",),
    "Service": ("selector", "ports"),
}


def of(kind: str) -> Iterator[Object]:
    return (document for _, document in ALL if document["kind"] == kind)


def pod_templates() -> list[Object]:
    return [document["spec"]["template"] for kind in ("Deployment", "Job") for document in of(kind)]


@pytest.mark.parametrize(
    "document",
    [one for _, one in ALL],
    ids=[f"{folder}-{one['kind']}-{one['metadata']['name']}" for folder, one in ALL],
)
def test_every_object_is_whole(document: Object) -> None:
    assert document["apiVersion"] and document["metadata"]["name"]
    assert "namespace" not in document["metadata"]  # the kustomization sets it
    missing = [field for field in REQUIRED.get(document["kind"], ()) if field not in document["spec"]]
    assert missing == []


def test_what_selects_finds_something() -> None:
    templates = [template["metadata"]["labels"] for template in pod_templates()]
    rollout = names.pod_labels("run-1", "t-r0-a1", network=True)
    wanted = [service["spec"]["selector"] for service in of("Service")]
    wanted += [deployment["spec"]["selector"]["matchLabels"] for deployment in of("Deployment")]
    for policy in of("NetworkPolicy"):
        wanted.append(policy["spec"]["podSelector"]["matchLabels"])
        rules = [*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())]
        peers = [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]
        wanted += [peer["podSelector"]["matchLabels"] for peer in peers]
    assert len(wanted) > 8
    for labels in wanted:
        assert any(labels.items() <= found.items() for found in [*templates, rollout]), labels


def allowed(labels: dict[str, str]) -> set[int]:
    """Ports of the orchestrator that a pod with these labels may reach; the policies add up."""
    ports: set[int] = set()
    covered = False
    for policy in of("NetworkPolicy"):
        spec = policy["spec"]
        if "Egress" in spec["policyTypes"] and spec["podSelector"]["matchLabels"].items() <= labels.items():
            covered = True
            ports |= {port["port"] for rule in spec.get("egress", ()) for port in rule["ports"]}
    assert covered, "no policy covers it: everything is allowed"
    return ports


def test_an_agent_reaches_the_proxy_and_a_verifier_does_not() -> None:
    run = load_config(_Whole, DEPLOY / "base" / "run.toml", ())
    gateway, proxy = run.sandbox.kubernetes.gateway_port, run.proxy.port
    assert allowed(names.pod_labels("r", "t-r0-a1", network=True)) == {gateway, proxy}
    assert allowed(names.pod_labels("r", "t-r0-a1-verify", network=False)) == {gateway}
    (service,) = [one for one in of("Service") if one["metadata"]["name"] == run.sandbox.kubernetes.gateway_host]
    assert {port["port"] for port in service["spec"]["ports"]} == {gateway, proxy}


class _Whole(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: RunOptions = RunOptions()


def test_no_pod_of_ours_has_more_rights_than_restricted_pods_may() -> None:
    for template in pod_templates():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


def rules() -> list[Object]:
    role, *others = of("Role")
    found: list[Object] = role["rules"]
    assert [one["rules"] for one in others] == [found] * len(others)  # the same in every namespace
    return found


def test_a_further_namespace_grants_its_rights_to_the_orchestrator_of_the_first() -> None:
    subjects = [subject for binding in of("RoleBinding") for subject in binding["subjects"]]
    namespace = yaml.safe_load((DEPLOY / "base" / "kustomization.yaml").read_text())["namespace"]
    assert subjects == [{"kind": "ServiceAccount", "name": "openforgerl-orchestrator", "namespace": namespace}] * 2


@pytest.fixture
async def applied(fake: FakeCluster) -> FakeCluster:
    """`base` and `more` in their namespaces, and pods that nobody runs: `namespace/part` with a rollout's labels."""
    for folder in ("base", "more"):
        namespace = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["namespace"]
        labels = next(one for one in documents(folder) if one["kind"] == "Namespace")["metadata"]["labels"]
        labels = labels | {"kubernetes.io/metadata.name": namespace}  # the API server's own
        fake.registry.create(NAMESPACES, "", {"metadata": {"name": namespace, "labels": labels}})
        for policy in (one for one in documents(folder) if one["kind"] == "NetworkPolicy"):
            fake.registry.create(POLICIES, namespace, policy)
    fake.registry.create(NAMESPACES, "", {"metadata": {"name": "foreign"}})
    agent, verifier = (names.pod_labels("r", "t-r0-a1", network=network) for network in (True, False))
    orchestrator = next(of("Job"))["spec"]["template"]["metadata"]["labels"]
    made = {"agent": agent, "verifier": verifier, "orchestrator": orchestrator, "other": {"app": "db"}}
    for namespace in ("openforgerl", "openforgerl-more", "foreign"):
        for name, labels in made.items():
            spec = {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never", "nodeSelector": {"a": "b"}}
            fake.registry.create(PODS, namespace, {"metadata": {"name": name, "labels": labels}, "spec": spec})
    return fake


async def test_what_a_rollout_reaches_from_any_namespace(applied: FakeCluster) -> None:
    """Proxy 8080 and gateway 8090 of the one orchestrator, a verifier only the gateway, and nothing else at all."""
    doors = [(pod, port) for pod in applied.objects.list(PODS) for port in (8080, 8090, 443)]
    home, reached = ("openforgerl", "orchestrator"), {}
    for namespace in ("openforgerl", "openforgerl-more"):
        for name in ("agent", "verifier"):
            source = (namespace, name)
            reached[source] = {
                (pod.key, port) for pod, port in doors if pod.key != source and applied.reachable(source, pod.key, port)
            }
            assert not applied.reachable(source, "192.0.2.1", 443)
        assert reached[namespace, "agent"] == {(home, 8080), (home, 8090)}
        assert reached[namespace, "verifier"] == {(home, 8090)}
    assert not applied.reachable(("foreign", "agent"), home, 8090)  # its namespace is not one of the run's
    assert not applied.reachable(("openforgerl-more", "other"), home, 8090)
    assert not applied.reachable(home, ("openforgerl-more", "agent"), 8080)  # nobody dials a rollout


def test_the_role_is_what_doctor_asks_for() -> None:
    granted = {(label, verb) for rule in rules() for label in rule["resources"] for verb in rule["verbs"]}
    asked = {(f"{kind.plural}{'/' + sub if sub else ''}", verb) for kind, sub, verbs in RIGHTS for verb in verbs}
    assert granted == asked


async def test_the_role_is_what_a_run_uses_and_no_more(fake: FakeCluster, backend: Any, tmp_path: Path) -> None:
    """With the role's rights alone: rollouts, a failure with its log, a predecessor, reaping. Every verb is used."""
    token = fake.access.add("orchestrator", rules(), namespace="rollouts")
    spec, other = SandboxSpec(run_id="run-1"), SandboxSpec(run_id="run-2")
    fake.scenarios.attach("exit-3", name="*-a7", after=20.0)
    async with backend(token=token, lease_seconds=1) as sandboxes:
        async with sandboxes.create(spec, "t-r0-a1") as sandbox:
            assert (await sandbox.exec(["echo", "x"], env={}, timeout=10)).stdout == b"x"
            await asyncio.sleep(0.5)  # a third of the lease: it is renewed
        async with (
            backend(token=token) as dead,
            dead.create(other, "t-r0-a1"),
            backend(token=token) as successor,
            successor.create(other, "t-r0-a1"),
        ):
            assert len(await successor.list("run-2")) == 1
        with pytest.raises(StageError, match="exit code 3"):
            async with sandboxes.create(spec, "t-r0-a7") as broken:
                for _ in range(100):
                    await broken.exec(["echo", "x"], env={}, timeout=60)
                    await asyncio.sleep(0.1)
        cluster = await sandboxes._connect()
        await find_runs(cluster, 0.0)
        left = sandboxes.create(spec, "t-r0-a2")
        await left.__aenter__()
        await reap_run(cluster, "run-1", grace=0, seconds=20)
        await left.__aexit__(None, None, None)
    used = {(resource, verb) for verb, resource in fake.counts.calls}
    granted = {(label, verb) for rule in rules() for label in rule["resources"] for verb in rule["verbs"]}
    assert used <= granted, "more than the role grants (answered 403)"
    assert granted - used == set(), "granted and never used"
    assert 403 not in fake.counts.answers


async def test_quota_and_reaping_by_lease(fake: FakeCluster, backend: Any) -> None:
    fake.registry.create(QUOTAS, "rollouts", {**next(of("ResourceQuota"))})
    async with backend(lease_seconds=1) as dead, backend() as living:
        # the first owner is as good as dead: nothing renews its lease any more
        await (lost := dead.create(SandboxSpec(run_id="run-dead"), "t-r0-a1")).__aenter__()
        await (kept := living.create(SandboxSpec(run_id="run-living"), "t-r0-a1")).__aenter__()
        (await dead._runs["run-dead"].sites.open("rollouts")).hold._renewing.cancel()
        await asyncio.sleep(1.2)
        cluster = await living._connect()
        found = {run.run_id: (run.pods, run.expired) for run in await find_runs(cluster, time.time())}
        assert found == {"run-dead": (1, True), "run-living": (1, False)}
        lines = await reap_expired(living._all, {}, time.time(), True)
        assert [line.partition(":")[2].split(",")[0] for line in lines] == [" 1 pods", " 1 pods"]
        lines = await reap_expired(living._all, {}, time.time(), False)
        assert lines[0] == "run-dead: 1 pods destroyed" and "left alone" in lines[1]
        assert [pod["metadata"]["labels"][names.RUN_LABEL] for pod in (await cluster.list(POD)).items] == ["run-living"]
        assert len((await cluster.list(LEASE)).items) == 1
        await lost.__aexit__(None, None, None)
        await kept.__aexit__(None, None, None)
