"""What a pod is made of."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from openforgerl.config import load_config
from openforgerl.config.schema import RoomsConfig
from openforgerl.errors import InputError
from openforgerl.orchestrator import RunOptions
from openforgerl.sandboxes.images import REPOSITORY
from openforgerl.sandboxes.kubernetes import manifests, names
from openforgerl.sandboxes.kubernetes.manifests import Boarding
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions, Toleration
from openforgerl.types import Layer, SandboxLimits, SandboxSpec

BUILT = f"{REPOSITORY}/task:abc"
OWNER = {"metadata": {"name": "ofrl-run-1", "uid": "1-2-3"}}
OPTIONS = KubernetesOptions(image="registry.example/base@sha256:aa", layers="present")


def make(options: KubernetesOptions = OPTIONS, **spec: Any) -> dict[str, Any]:
    boarding = Boarding(
        attempt_id="t1-r0-a3",
        nonce="n",
        arguments=("dial", "{}"),
        env={"OPENFORGERL_TOKEN": "secret"},
        init_map="ofrl-run-1-b",
    )
    return manifests.pod(SandboxSpec(run_id="run-1", **spec), options, boarding, OWNER)


def test_nothing_is_given_to_an_agent_that_it_need_not_have() -> None:
    spec = make()["spec"]
    container = spec["containers"][0]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hostNetwork" not in spec and "hostPID" not in spec
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert spec["dnsPolicy"] == "None"


def test_a_pod_ends_by_itself_and_goes_with_its_run() -> None:
    made = make()
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "ofrl-run-1", "uid": "1-2-3"}
    ]
    assert made["spec"]["activeDeadlineSeconds"] == 7200
    assert made["spec"]["restartPolicy"] == "Never"
    lost = [t for t in made["spec"]["tolerations"] if t["key"] == "node.kubernetes.io/unreachable"]
    assert lost[0]["tolerationSeconds"] == 30 and lost[0]["effect"] == "NoExecute"


def test_limits_become_requests_limits_and_sizes() -> None:
    made = make(limits=SandboxLimits(memory_mb=512, disk_mb=32), scratch=("/logs",))
    resources = made["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "576Mi"  # 512, and 64 for our init
    assert "cpu" not in resources["limits"] and resources["requests"]["cpu"] == "250m"
    volumes = {volume["name"]: volume for volume in made["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in made["spec"]["containers"][0]["volumeMounts"]}
    for path in ("/tmp", "/home/agent", "/workspace", "/logs"):
        assert volumes[mounts[path]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Mi"}
    assert mounts["/var/tmp"] == mounts["/tmp"]


def test_on_disk_all_writable_directories_count() -> None:
    options = KubernetesOptions(image="i", layers="present", writable="disk", cpu_limit="2")
    resources = make(options, limits=SandboxLimits(disk_mb=100))["spec"]["containers"][0]["resources"]
    assert resources["limits"]["ephemeral-storage"] == "300Mi"  # /tmp, home, work directory
    assert resources["limits"]["cpu"] == "2"


def test_names_are_the_same_for_the_same_attempt_and_valid() -> None:
    name = names.pod_name("run-1", "t1-r0-a3")
    assert name == names.pod_name("run-1", "t1-r0-a3")
    ids = ["t1-r0-a3", "t1-r0-a4", "t1-r0-a3-verify", "t2-r0-a3", "no number", "Ünïcode/../" * 40, "x-a" + "9" * 90]
    made = [names.pod_name("run-1", attempt) for attempt in ids]
    assert len(set(made)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one) for one in made)
    assert name.endswith("-a3")


@pytest.mark.parametrize("text", ["run-1", "", "a b", "-x-", "ü" * 100, "x" * 63, "x" * 64, "a/b", "..."])
def test_label_values_are_valid(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", names.label_value(text))


def test_a_graded_sandbox_is_labelled_for_no_network() -> None:
    assert make()["metadata"]["labels"][names.NETWORK_LABEL] == "none"
    assert make(endpoint=("10.0.0.1", 8080))["metadata"]["labels"][names.NETWORK_LABEL] == "proxy"


LAYER = Layer(source="/cache/pi", target="/opt/pi")


def test_layers_are_copied_mounted_or_taken_from_the_node() -> None:
    copy = make(KubernetesOptions(image="i", layer_images={"/opt/pi": "pi:1"}), layers=(LAYER,))["spec"]
    assert copy["initContainers"][0]["image"] == "pi:1"
    assert copy["initContainers"][0]["command"][-1] == "/opt/pi"
    assert copy["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mount = {"name": "layer-0", "mountPath": "/opt/pi", "readOnly": True}
    assert mount in copy["containers"][0]["volumeMounts"]
    options = KubernetesOptions(image="i", layers="volume", layer_images={"/opt/pi": "pi:1"})
    volume = make(options, layers=(LAYER,))["spec"]
    assert {"name": "layer-0", "image": {"reference": "pi:1", "pullPolicy": "IfNotPresent"}} in volume["volumes"]
    host = make(KubernetesOptions(image="i", layers="host"), layers=(LAYER,))["spec"]
    assert {"name": "layer-0", "hostPath": {"path": "/cache/pi", "type": "Directory"}} in host["volumes"]
    assert not any(m["mountPath"] == "/opt/pi" for m in make(layers=(LAYER,))["spec"]["containers"][0]["volumeMounts"])


def test_what_no_pod_can_be_made_of_is_refused() -> None:
    with pytest.raises(InputError, match="image is empty"):
        manifests.check(SandboxSpec(run_id="r"), KubernetesOptions())
    with pytest.raises(InputError, match="/opt/pi"):
        manifests.check(SandboxSpec(run_id="r", layers=(LAYER,)), KubernetesOptions(image="i"))


def test_placement() -> None:
    options = KubernetesOptions(
        image="i",
        layers="present",
        node_selector={"pool": "agents"},
        runtime_class="gvisor",
        priority_class="low",
        pull_secrets=("s",),
        tolerations=(Toleration(key="agents", operator="Exists", effect="NoSchedule"),),
        user_namespaces=True,
    )
    spec = make(options)["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "agents"}
    assert (spec["runtimeClassName"], spec["priorityClassName"], spec["hostUsers"]) == ("gvisor", "low", False)
    assert spec["imagePullSecrets"] == [{"name": "s"}]
    assert spec["tolerations"][-1] == {"key": "agents", "operator": "Exists", "effect": "NoSchedule"}
    plain = make()["spec"]
    assert plain["nodeSelector"] == {"kubernetes.io/arch": "amd64"}  # our system-call filter is of one machine
    assert not {"runtimeClassName", "priorityClassName", "hostUsers", "imagePullSecrets"} & set(plain)


class _Whole(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: RunOptions = RunOptions()


def test_placement_as_a_user_writes_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        [sandbox.kubernetes]
        image = "i"
        layers = "present"
        runtime_class = "gvisor"
        node_selector = {pool = "agents", "sandbox.gke.io/runtime" = "gvisor"}
        tolerations = [
          {key = "sandbox.gke.io/runtime", value = "gvisor", effect = "NoSchedule"},
          {operator = "Exists", effect = "NoExecute", tolerationSeconds = 5},
        ]
        """
    )
    words = ["sandbox.kubernetes.priority_class=low"]
    options = load_config(_Whole, tmp_path / "run.toml", words).sandbox.kubernetes
    spec = make(options)["spec"]
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("gvisor", "low")
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "agents", "sandbox.gke.io/runtime": "gvisor"}
    assert spec["tolerations"][2:] == [
        {"key": "sandbox.gke.io/runtime", "operator": "Equal", "value": "gvisor", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
    ]


def test_the_bundle_is_our_init_and_python_imports_it(tmp_path: Path) -> None:
    data = manifests.init_bundle()
    assert data == manifests.init_bundle()
    assert len(data) < 256 << 10  # a ConfigMap holds 1 MiB, and this one is in every node's memory
    assert "inside/init.py" in zipfile.ZipFile(io.BytesIO(data)).namelist()
    (tmp_path / "init.zip").write_bytes(data)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'init.zip')!r}); from inside.init import main; main()"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, "dial", "{}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "must be PID 1" in done.stderr  # it would kill every process that it can signal


def test_the_run_object_and_its_lease() -> None:
    run = manifests.run_map("run-1", b"zip")
    assert run["immutable"] is True
    assert run["binaryData"] == {"init.zip": "emlw"}
    lease = manifests.lease("run-1", "me", 60, OWNER, 0.0)
    assert lease["spec"]["renewTime"] == "1970-01-01T00:00:00.000000Z"
    assert lease["metadata"]["ownerReferences"][0]["uid"] == "1-2-3"


def test_a_tasks_own_image_is_where_it_was_pushed() -> None:
    options = KubernetesOptions(image="base:1", layers="present", registry="registry.example/team/")
    images = {name: make(options, image=name)["spec"]["containers"][0]["image"] for name in ("", "python:3", BUILT)}
    assert images == {"": "base:1", "python:3": "python:3", BUILT: "registry.example/team/task:abc"}
    assert make(OPTIONS, image=BUILT)["spec"]["containers"][0]["image"] == BUILT


def test_every_node_pulls_what_is_asked() -> None:
    options = KubernetesOptions(
        node_selector={"pool": "agents"}, pull_secrets=("s",), tolerations=(Toleration(key="a"),)
    )
    made = manifests.prepull(["base:1", "pi:1"], options)
    spec = made["spec"]["template"]["spec"]
    assert [container["image"] for container in spec["containers"]] == ["base:1", "pi:1"]
    assert made["spec"]["selector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "agents"}
    assert spec["tolerations"] == [{"key": "a", "operator": "Equal"}]
    assert spec["securityContext"]["runAsNonRoot"] is True
