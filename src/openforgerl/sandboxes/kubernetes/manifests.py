"""The objects of a run as the API takes them. Pure; what each field is for is said where it is not plain."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.sandboxes.images import REPOSITORY
from openforgerl.sandboxes.kubernetes import names
from openforgerl.sandboxes.kubernetes.classification import CONTAINER
from openforgerl.sandboxes.kubernetes.cluster import Object
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.spec import AGENT_UID, HOSTNAME, INIT_HOME, check_spec, writable_directories
from openforgerl.types import Layer, SandboxSpec

INIT_KEY = "init.zip"
_START = f"import sys; sys.path.insert(0, '{INIT_HOME}/{INIT_KEY}'); from inside.init import main; main()"
_INIT_MB = 64
"""Memory of our init, on top of the agent's."""
_TEMPORARY = "/tmp"


class Boarding(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod is given beside its spec."""

    attempt_id: str
    nonce: str
    arguments: Sequence[str]
    """Of our init."""
    env: Mapping[str, str]
    """Of our init, which wipes it before an agent's program starts: the credential is here."""
    init_map: str
    """Name of the ConfigMap that brings our init."""


def pod(spec: SandboxSpec, options: KubernetesOptions, boarding: Boarding, owner: Object) -> Object:
    """A bare pod that runs our init. `owner` is the run's ConfigMap as the server returned it."""
    volumes, mounts, copies = _volumes(spec, options)
    volumes.append({"name": "init", "configMap": {"name": boarding.init_map, "items": [_whole(INIT_KEY)]}})
    mounts.append({"name": "init", "mountPath": INIT_HOME, "readOnly": True})
    container: Object = {
        "name": CONTAINER,
        "image": image_of(spec, options),
        "imagePullPolicy": options.pull_policy,
        "command": [options.python, "-I", "-S", "-X", "utf8", "-c", _START, *boarding.arguments],
        "env": [{"name": name, "value": value} for name, value in sorted(boarding.env.items())],
        "workingDir": "/",
        "resources": _resources(spec, options),
        "volumeMounts": mounts,
        # What a failing init says is kept in the pod's status; logs are gone after a rotation.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _locked_down(),
    }
    body: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": options.deadline,
        "terminationGracePeriodSeconds": options.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # else every Service of the namespace is in the environment
        "hostname": HOSTNAME,
        # Everything is reached by address. An agent's resolver would be a way out where no NetworkPolicy is enforced.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": _as_the_agent(),
        "tolerations": _tolerations(options),
        "containers": [container],
        "volumes": volumes,
    }
    body |= {"initContainers": copies} if copies else {}
    body |= _placement(options)
    return {
        "metadata": {
            "name": names.pod_name(spec.run_id, boarding.attempt_id),
            "labels": names.pod_labels(spec.run_id, boarding.attempt_id, network=spec.endpoint is not None),
            "annotations": {
                names.RUN_NOTE: spec.run_id,
                names.ATTEMPT_NOTE: boarding.attempt_id,
                names.NONCE_NOTE: boarding.nonce,
                # An autoscaler that empties a node would break rollouts to save a machine.
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            },
            "ownerReferences": [_reference(owner)],
        },
        "spec": body,
    }


def run_map(run_id: str, init: bytes) -> Object:
    """The object that owns the run: deleting it deletes all. It also brings our init into every pod."""
    return {
        "metadata": _of_run(run_id, names.run_object(run_id)),
        "immutable": True,  # nodes need not watch it
        "binaryData": {INIT_KEY: base64.b64encode(init).decode()},
    }


def init_map(run_id: str, init: bytes, owner: Object) -> Object:
    """Brings our init where the owner brings another: after an upgrade, in a run whose pods live."""
    made = run_map(run_id, init)
    made["metadata"] |= {"name": names.init_object(run_id, init), "ownerReferences": [_reference(owner)]}
    return made


def lease(run_id: str, holder: str, seconds: int, owner: Object, now: float, *, home: str = "") -> Object:
    """The sign that a run's owner lives. It goes with the run object."""
    metadata = _of_run(run_id, names.run_object(run_id))
    metadata["annotations"][names.HOME_NOTE] = home
    return {
        "metadata": metadata | {"ownerReferences": [_reference(owner)]},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": micro_time(now)},
    }


def micro_time(now: float) -> str:
    """Unix seconds as the API's MicroTime."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def init_bundle() -> bytes:
    """Our init as a zip that Python imports from; the same bytes every time."""
    folder = Path(__file__).parents[1] / "inside"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"inside/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def image_of(spec: SandboxSpec, options: KubernetesOptions) -> str:
    """The task's own image, where `openforgerl images push` sent it if we built it; else the configured one."""
    if not spec.image:
        return options.image
    ours = spec.image.startswith(REPOSITORY + "/") and options.registry
    return f"{options.registry.rstrip('/')}/{spec.image.removeprefix(REPOSITORY + '/')}" if ours else spec.image


def prepull(images: Sequence[str], options: KubernetesOptions) -> Object:
    """A DaemonSet that has every node pull `images` (each needs /bin/sh), and keeps them from being collected."""
    labels = {names.APP_LABEL: names.APP, names.PART_LABEL: "prepull"}
    shared: Object = {
        "imagePullPolicy": options.pull_policy,
        "securityContext": _locked_down(),
        "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"memory": "16Mi"}},
    }
    containers = [
        {
            "name": f"image-{number}",
            "image": image,
            "command": ["/bin/sh", "-c", "while :; do sleep 3600; done"],
            **shared,
        }
        for number, image in enumerate(images)
    ]
    spec: Object = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": _as_the_agent(),
        "tolerations": _tolerations(options)[2:],
        "containers": containers,
    }
    placed = _placement(options)
    spec |= {name: placed[name] for name in ("nodeSelector", "imagePullSecrets", "priorityClassName") if name in placed}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "openforgerl-prepull", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def check(spec: SandboxSpec, options: KubernetesOptions) -> None:
    """Refuse what no pod can be made of. Raises InputError naming the field."""
    # The directory of a layer need not be here: its image has it.
    check_spec(msgspec.structs.replace(spec, layers=[msgspec.structs.replace(one, source="/") for one in spec.layers]))
    if not image_of(spec, options):
        raise InputError("sandbox.kubernetes.image is empty: name the image of the sandboxes (docs/kubernetes.md)")
    if options.layers in ("copy", "volume"):
        missing = [layer.target for layer in spec.layers if not _image_of(layer, options)]
        if missing:
            raise InputError(
                f"sandbox.kubernetes.layer_images names no image for {', '.join(missing)}: build one with the "
                'harness at that path, or set layers = "present" when the image holds it already'
            )


def _volumes(spec: SandboxSpec, options: KubernetesOptions) -> tuple[list[Object], list[Object], list[Object]]:
    """(volumes, mounts, init containers) of the writable directories and the layers."""
    volumes: list[Object] = []
    mounts: list[Object] = []
    copies: list[Object] = []
    medium = {"medium": "Memory"} if options.writable == "memory" else {}
    for number, path in enumerate(writable_directories(spec)):
        name = f"writable-{number}"
        volumes.append({"name": name, "emptyDir": {**medium, "sizeLimit": f"{spec.limits.disk_mb}Mi"}})
        mounts.append({"name": name, "mountPath": path})
        if path == _TEMPORARY:
            mounts.append({"name": name, "mountPath": "/var/tmp"})
    if options.layers != "present":
        for number, layer in enumerate(spec.layers):
            _add_layer(layer, f"layer-{number}", options, (volumes, mounts, copies))
    return volumes, mounts, copies


def _add_layer(
    layer: Layer, name: str, options: KubernetesOptions, to: tuple[list[Object], list[Object], list[Object]]
) -> None:
    volumes, mounts, copies = to
    mount: Object = {"name": name, "mountPath": layer.target, "readOnly": True}
    if options.layers == "host":
        volumes.append({"name": name, "hostPath": {"path": layer.source, "type": "Directory"}})
    elif options.layers == "volume":
        image = {"reference": _image_of(layer, options), "pullPolicy": options.pull_policy}
        volumes.append({"name": name, "image": image})
        mount["subPath"] = layer.target.strip("/")
    else:
        volumes.append({"name": name, "emptyDir": {}})
        copies.append(
            {
                "name": name,
                "image": _image_of(layer, options),
                "imagePullPolicy": options.pull_policy,
                "command": ["/bin/sh", "-c", 'cp -a "$1"/. /layer/', "sh", layer.target],
                "volumeMounts": [{"name": name, "mountPath": "/layer"}],
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": _locked_down(),
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
            }
        )
    mounts.append(mount)


def _image_of(layer: Layer, options: KubernetesOptions) -> str:
    """The option's image; else the layer's own source where that is an image reference and no directory."""
    return options.layer_images.get(layer.target) or ("" if layer.source.startswith("/") else layer.source)


def _resources(spec: SandboxSpec, options: KubernetesOptions) -> Object:
    """Memory requested = limit, so that a full node evicts others first. On disk, all writable directories count."""
    memory = f"{spec.limits.memory_mb + _INIT_MB}Mi"
    disk = spec.limits.disk_mb * (len(writable_directories(spec)) if options.writable == "disk" else 1)
    fixed = {"memory": memory, "ephemeral-storage": f"{disk}Mi"}
    limits = fixed | ({"cpu": options.cpu_limit} if options.cpu_limit else {})
    return {"requests": {"cpu": options.cpu_request, **fixed}, "limits": limits}


def _as_the_agent() -> Object:
    return {
        "runAsUser": AGENT_UID,
        "runAsGroup": AGENT_UID,
        "runAsNonRoot": True,
        "fsGroup": AGENT_UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _locked_down() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _tolerations(options: KubernetesOptions) -> list[Object]:
    """A pod on a lost node is given up by the cluster as soon as by us."""
    seconds = max(1, round(options.lost_node_timeout))
    lost: list[Object] = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": seconds,
        }
        for taint in ("not-ready", "unreachable")
    ]
    return [*lost, *({k: v for k, v in msgspec.to_builtins(t).items() if v is not None} for t in options.tolerations)]


def _placement(options: KubernetesOptions) -> Object:
    given: Object = {
        "nodeSelector": {"kubernetes.io/arch": options.architecture, **options.node_selector},
        "priorityClassName": options.priority_class,
        "runtimeClassName": options.runtime_class,
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
        "hostUsers": False if options.user_namespaces else None,
    }
    return {name: value for name, value in given.items() if value not in (None, "", {}, [])}


def _of_run(run_id: str, name: str) -> Object:
    labels = names.run_labels(run_id) | {names.PART_LABEL: names.RUN_PART}
    return {"name": name, "labels": labels, "annotations": {names.RUN_NOTE: run_id}}


def _reference(owner: Object) -> Object:
    metadata = owner["metadata"]
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"]}


def _whole(key: str) -> Object:
    return {"key": key, "path": key}
