"""deploy/ray: every object is one that an API server takes, and together they say what docs/cluster.md says."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforgerl.cli.train import grpo
from openforgerl.config import load_config
from openforgerl.sandboxes.kubernetes import names
from openforgerl.training.configs import GrpoConfig
from openforgerl.training.verl.command import grpo_overrides

from .manifest_types import faults

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RAY = DEPLOY / "ray"
Object = dict[str, Any]


def documents(folder: Path) -> Iterator[Object]:
    """Every object that a kustomization and those it includes name, with the namespace that they set."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in said["resources"]:
        if (folder / name).is_dir():
            yield from documents(folder / name)
            continue
        for document in yaml.safe_load_all((folder / name).read_text()):
            if document["kind"] != "Namespace":
                document["metadata"].setdefault("namespace", said.get("namespace"))
            yield document


OBJECTS = [
    *documents(RAY),
    *documents(DEPLOY / "kubernetes" / "base"),
    *documents(DEPLOY / "kubernetes" / "proxy"),
    yaml.safe_load((RAY / "loader.yaml").read_text()),
]


def of(kind: str, namespace: str) -> list[Object]:
    return [
        copy.deepcopy(one) for one in OBJECTS if one["kind"] == kind and one["metadata"].get("namespace") == namespace
    ]


def job() -> Object:
    (found,) = of("RayJob", "openforgerl-training")
    return found


def cluster() -> Object:
    return job()["spec"]["rayClusterSpec"]


def head() -> Object:
    return cluster()["headGroupSpec"]["template"]


def worker() -> Object:
    (group,) = cluster()["workerGroupSpecs"]
    return group["template"]


def train_config() -> GrpoConfig:
    flags = {"engine": {"kind": "torch", "path": "/models/policy"}, "trainer": "verl"}
    return load_config(GrpoConfig, RAY / "training" / "train.toml", (), flags=flags)


@pytest.mark.parametrize(
    "document", OBJECTS, ids=[f"{one['kind']}-{number}-{one['metadata']['name']}" for number, one in enumerate(OBJECTS)]
)
def test_every_object_is_one_that_its_kind_allows(document: Object) -> None:
    assert faults(document) == []


def planted() -> list[tuple[str, Object, str]]:
    """A field name, a type, an absent field, a bound: each put where it does harm."""
    misspelt, typed, absent, bound, deep, quantity = (job() for _ in range(6))
    misspelt["spec"]["entryPoint"] = misspelt["spec"].pop("entrypoint")
    typed["spec"]["backoffLimit"] = "10"
    del absent["spec"]["rayClusterSpec"]["headGroupSpec"]
    bound["spec"]["preRunningDeadlineSeconds"] = 0
    deep["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    workers = quantity["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    workers["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = 8
    (policy, *_) = of("NetworkPolicy", "openforgerl-rollouts")
    policy["spec"]["podselector"] = policy["spec"].pop("podSelector")
    (claim, _) = of("PersistentVolumeClaim", "openforgerl-training")
    claim["spec"]["accessModes"] = "ReadWriteMany"
    (role,) = of("Role", "openforgerl-rollouts")
    del role["rules"][0]["verbs"]
    return [
        ("a misspelt field", misspelt, "spec.entryPoint: unknown field"),
        ("a number as text", typed, "spec.backoffLimit: integer is wanted, not '10'"),
        ("no head", absent, "spec.rayClusterSpec.headGroupSpec: is missing"),
        ("below its bound", bound, "spec.preRunningDeadlineSeconds: 0 is below 1"),
        (
            "a misspelt field of a pod",
            deep,
            "spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].volumeMount: unknown field",
        ),
        (
            "a quantity as a number",
            quantity,
            "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].resources.limits.nvidia.com/gpu: "
            "8 is no quantity",
        ),
        ("a misspelt selector", policy, "NetworkPolicy.spec.podselector: unknown field"),
        (
            "text for a list",
            claim,
            "PersistentVolumeClaim.spec.accessModes: a list is wanted, not 'ReadWriteMany'",
        ),
        ("a rule without verbs", role, "Role.rules[0].verbs: is missing"),
    ]


@pytest.mark.parametrize(("document", "said"), [case[1:] for case in planted()], ids=[case[0] for case in planted()])
def test_a_planted_fault_is_found(document: Object, said: str) -> None:
    assert said in faults(document)


def test_the_schema_says_where_it_is_from() -> None:
    text = (Path(__file__).parent / "schemas" / "kuberay.json").read_text()
    assert '"tag": "v1.7.0"' in text and "ray-project/kuberay" in text
    assert "description" not in text


def test_what_the_operator_asks_beyond_its_schema() -> None:
    """KubeRay 1.7.0, controllers/ray/utils/validation.go."""
    spec = job()["spec"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job()["metadata"]["name"])
    assert len(job()["metadata"]["name"]) <= 47
    assert spec["backoffLimit"] >= 0 and spec["preRunningDeadlineSeconds"] > 0
    assert spec["shutdownAfterJobFinishes"] and spec["ttlSecondsAfterFinished"] >= 0
    for group in cluster()["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster()["headGroupSpec"], *cluster()["workerGroupSpecs"]):
        assert group["template"]["spec"]["containers"]
        assert "labels" not in group["rayStartParams"] and "resources" not in group


def test_ray_is_the_version_that_verl_is_pinned_to() -> None:
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints-verl.txt").read_text(), re.M)
    assert cluster()["rayVersion"] == pinned


def test_the_entrypoint_is_a_command_of_ours() -> None:
    program, group, verb, *words = shlex.split(job()["spec"]["entrypoint"])
    assert (program, group, verb) == ("openforgerl", "train", "grpo")
    mounts = {one["mountPath"] for one in head()["spec"]["containers"][0]["volumeMounts"]}
    with grpo.make_context("grpo", list(words), resilient_parsing=True) as context:
        assert context.params["trainer"] == "verl"
    paths = {flag: words[words.index(flag) + 1] for flag in ("--model", "--run", "--config")}
    assert {"/" + path.split("/")[1] for path in paths.values()} <= mounts


def test_the_config_is_the_clusters() -> None:
    config = train_config()
    said = grpo_overrides(config, Path("/runs/grpo"), tasks=100)
    (group,) = cluster()["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert (said["trainer.nnodes"], str(said["trainer.n_gpus_per_node"])) == (group["replicas"], gpus)
    assert "ray_kwargs.ray_init.num_cpus" not in said  # Ray refuses it where a cluster is there already
    assert config.run.concurrency == config.train.groups_per_step * config.train.group_size
    (quota,) = of("ResourceQuota", "openforgerl-rollouts")
    assert int(quota["spec"]["hard"]["pods"]) >= 2 * config.run.concurrency  # each has a verifier's pod after it


def allowed(labels: dict[str, str]) -> set[int]:
    """Ports of the head that a pod of the rollouts' namespace with these labels may reach, by both sides' policies."""
    leaving: set[int] = set()
    for policy in of("NetworkPolicy", "openforgerl-rollouts"):
        if selects(policy["spec"]["podSelector"], labels):
            for rule in policy["spec"].get("egress", ()):
                if any(peer_is(peer, "openforgerl-training", head()["metadata"]["labels"]) for peer in rule["to"]):
                    leaving |= {port["port"] for port in rule["ports"]}
    return leaving & entering("openforgerl-rollouts", labels, head()["metadata"]["labels"])


def entering(namespace: str, labels: dict[str, str], target: dict[str, str]) -> set[int]:
    """Ports of a pod of the training namespace that a pod elsewhere may reach; {0} = all."""
    ports: set[int] = set()
    for policy in of("NetworkPolicy", "openforgerl-training"):
        if selects(policy["spec"]["podSelector"], target):
            for rule in policy["spec"]["ingress"]:
                if any(peer_is(peer, namespace, labels, own="openforgerl-training") for peer in rule["from"]):
                    ports |= {port["port"] for port in rule.get("ports", ({"port": 0},))}
    return ports


def selects(selector: Object, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def peer_is(peer: Object, namespace: str, labels: dict[str, str], own: str = "") -> bool:
    there = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", own)
    return there == namespace and selects(peer.get("podSelector", {}), labels)


def test_who_reaches_whom() -> None:
    config = train_config()
    gateway, proxy = config.sandbox.kubernetes.gateway_port, config.proxy.port
    agent = names.pod_labels("r", "t-r0-a1", network=True)
    verifier = names.pod_labels("r", "t-r0-a1-verify", network=False)
    assert allowed(agent) == {gateway, proxy}
    assert allowed(verifier) == {gateway}
    assert allowed({"app": "stranger"}) == set()
    # Ray's own ports, which run whatever they are sent: closed to rollouts, open to Ray's pods.
    for target in (head()["metadata"]["labels"], worker()["metadata"]["labels"]):
        assert 8265 not in entering("openforgerl-rollouts", agent, target)
        assert entering("openforgerl-training", worker()["metadata"]["labels"], target) == {0}
        assert entering("kuberay-system", {"app.kubernetes.io/name": "kuberay"}, target) == {8265}
    assert entering("openforgerl-rollouts", agent, worker()["metadata"]["labels"]) == set()


def test_the_service_is_where_pods_are_told_to_look() -> None:
    config = train_config()
    (service,) = of("Service", "openforgerl-training")
    assert service["metadata"]["name"] == config.sandbox.kubernetes.gateway_host
    assert service["spec"]["selector"].items() <= head()["metadata"]["labels"].items()
    assert not selects({"matchLabels": service["spec"]["selector"]}, worker()["metadata"]["labels"])
    ports = {port["port"] for port in service["spec"]["ports"]}
    assert ports == {config.sandbox.kubernetes.gateway_port, config.proxy.port}
    assert ports <= {port["containerPort"] for port in head()["spec"]["containers"][0]["ports"]}


def test_the_head_alone_may_do_in_the_other_namespace_what_an_orchestrator_does() -> None:
    (role,) = of("Role", "openforgerl-rollouts")
    (base,) = of("Role", "openforgerl")
    assert role["rules"] == base["rules"]
    (binding,) = of("RoleBinding", "openforgerl-rollouts")
    (account,) = of("ServiceAccount", "openforgerl-training")
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "openforgerl-training")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert head()["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert worker()["spec"]["automountServiceAccountToken"] is False
    assert train_config().sandbox.kubernetes.namespace == "openforgerl-rollouts"


def test_what_is_mounted_is_there() -> None:
    claims = {claim["metadata"]["name"] for claim in of("PersistentVolumeClaim", "openforgerl-training")}
    maps = {
        one["name"] for one in yaml.safe_load((RAY / "training/kustomization.yaml").read_text())["configMapGenerator"]
    }
    (loader,) = of("Pod", "openforgerl-training")
    for spec in (head()["spec"], worker()["spec"], loader["spec"]):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {*claims, None}
            assert volume.get("configMap", {}).get("name") in {*maps, None}
    # the run folder is at the same path wherever veRL writes checkpoints
    places = [
        {m["mountPath"] for m in spec["containers"][0]["volumeMounts"]} for spec in (head()["spec"], worker()["spec"])
    ]
    assert all({"/runs", "/models"} <= place for place in places)


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
needs_cluster = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None,
    reason="no cluster: set KUBECONFIG and install kubectl",
)


def kubectl(*words: str, given: str | None = None) -> str:
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kubectl
def test_kustomize_puts_names_images_and_namespaces_where_they_belong() -> None:
    made = list(yaml.safe_load_all(kubectl("kustomize", str(RAY))))
    assert [fault for one in made for fault in faults(one)] == []
    (config,) = [one for one in made if one["kind"] == "ConfigMap"]
    assert config["metadata"]["name"].startswith("openforgerl-config-") and "train.toml" in config["data"]
    (found,) = [one["spec"]["rayClusterSpec"] for one in made if one["kind"] == "RayJob"]
    pods = [found["headGroupSpec"]["template"]["spec"], found["workerGroupSpecs"][0]["template"]["spec"]]
    assert {pod["containers"][0]["image"] for pod in pods} == {"registry.example/openforgerl-trainer:0.1.0"}
    assert pods[0]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    (binding,) = [one for one in made if one["kind"] == "RoleBinding"]
    assert binding["subjects"][0]["namespace"] == "openforgerl-training"
    assert {one["metadata"].get("namespace") for one in made if one["kind"] != "Namespace"} == {
        "openforgerl-training",
        "openforgerl-rollouts",
    }


@needs_cluster
@pytest.mark.cluster
@pytest.mark.parametrize("folder", ["ray", "kubernetes/base", "kubernetes/proxy"])
def test_a_cluster_takes_them(folder: str) -> None:
    """`--dry-run=server`: nothing is made. A dry-run makes no namespace either, so all is asked for in `default`."""
    made = list(yaml.safe_load_all(kubectl("kustomize", str(DEPLOY / folder))))
    known = kubectl("api-resources", "--api-group=ray.io", "-o", "name")
    without_ray = [one for one in made if one["kind"] != "RayJob" or "rayjobs" in known]
    for one in without_ray:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = "default"
    kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump_all(without_ray))
    if len(without_ray) < len(made):
        pytest.skip("all was taken but the RayJob: KubeRay is not installed in this cluster")
