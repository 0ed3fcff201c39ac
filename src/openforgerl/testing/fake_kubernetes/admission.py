"""What the API server does to an object on its way in: checks, defaults, and the quota."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.kinds import PODS, QUOTAS, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Objects, Stored

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_DECIMAL = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(r"^([0-9.]+)([A-Za-z]*)$")

UNREACHABLE = "node.kubernetes.io/unreachable"
NOT_READY = "node.kubernetes.io/not-ready"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


def quantity(value: Any) -> float:
    """`250m`, `1Gi`, `2` as a number. Raises Refusal (400)."""
    found = _QUANTITY.match(str(value))
    if found is None or found[2] not in _UNITS:
        raise statuses.bad_request(f"quantities must match the regular expression {_QUANTITY.pattern!r}: {value!r}")
    return float(found[1]) * _UNITS[found[2]]


def check(resource: Resource, body: Object) -> None:
    """Names and labels, and what a pod must have. Raises Refusal (422)."""
    metadata: dict[str, Any] = body["metadata"]
    name, causes = metadata["name"], dict[str, str]()
    if not _SUBDOMAIN.match(name) or len(name) > 253:
        causes["metadata.name"] = (
            f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric '
            "characters, '-' or '.', and must start and end with an alphanumeric character"
        )
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or not _LABEL_VALUE.match(value) or not _LABEL_KEY.match(key):
            causes["metadata.labels"] = f'Invalid value: "{value}": a valid label must be 63 characters or less'
    for owner in metadata.get("ownerReferences") or []:
        if not all(owner.get(field) for field in ("apiVersion", "kind", "name", "uid")):
            causes["metadata.ownerReferences"] = "Required value: apiVersion, kind, name and uid must not be empty"
    if resource is PODS:
        causes |= _check_pod(body.get("spec") or {})
    if causes:
        raise statuses.invalid(resource.kind, resource.group, name, causes)


def _check_pod(spec: dict[str, Any]) -> dict[str, str]:
    causes: dict[str, str] = {}
    if not spec.get("containers"):
        causes["spec.containers"] = "Required value"
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    names: list[str] = []
    for field in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(field) or []):
            at = f"spec.{field}[{index}]"
            names.append(container.get("name", ""))
            if not _LABEL.match(names[-1]) or len(names[-1]) > 63:
                causes[f"{at}.name"] = f'Invalid value: "{names[-1]}"'
            if not container.get("image"):
                causes[f"{at}.image"] = "Required value"
            if container.get("restartPolicy"):
                causes[f"{at}.restartPolicy"] = "this fake cluster plays no sidecar containers"
            for number, mount in enumerate(container.get("volumeMounts") or []):
                if mount.get("name") not in volumes:
                    causes[f"{at}.volumeMounts[{number}].name"] = f'Not found: "{mount.get("name")}"'
    if len(set(names)) != len(names):
        causes["spec.containers[].name"] = "Duplicate value"
    if spec.get("restartPolicy", "Always") != "Never":
        causes["spec.restartPolicy"] = "this fake cluster plays Never only: containers are not started again"
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and (not isinstance(deadline, int) or deadline < 1):
        causes["spec.activeDeadlineSeconds"] = f"Invalid value: {deadline}: must be between 1 and 2147483647"
    return causes


def default_pod(body: Object) -> None:
    """Fill in what the API server fills in (in place)."""
    spec: dict[str, Any] = body["spec"]
    for field, value in {
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "serviceAccountName": "default",
        "serviceAccount": spec.get("serviceAccountName", "default"),
        "enableServiceLinks": True,
        "securityContext": {},
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
    }.items():
        spec.setdefault(field, value)
    tolerations: list[dict[str, Any]] = list(spec.get("tolerations") or [])
    for key in (NOT_READY, UNREACHABLE):
        if not any(toleration.get("key") in (None, key) for toleration in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    spec["tolerations"] = tolerations
    mounts_token = spec.get("automountServiceAccountToken") is not False
    if mounts_token:
        source = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
        volume = {"name": "kube-api-access", "projected": {"sources": [source], "defaultMode": 420}}
        spec["volumes"] = [*(spec.get("volumes") or []), volume]
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        tag = container["image"].rpartition("/")[2]
        newest = "@" not in tag and (":" not in tag or tag.endswith(":latest"))
        container.setdefault("imagePullPolicy", "Always" if newest else "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        resources = container.setdefault("resources", {})
        if limits := resources.get("limits"):  # a limit without a request is the request too
            resources["requests"] = {**limits, **(resources.get("requests") or {})}
        if mounts_token:
            mount = {"name": "kube-api-access", "mountPath": TOKEN_PATH, "readOnly": True}
            container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    body["status"] = {"phase": "Pending", "qosClass": _quality(spec)}


def _quality(spec: dict[str, Any]) -> str:
    resources = [container.get("resources") or {} for container in spec["containers"]]
    if not any(one.get("requests") or one.get("limits") for one in resources):
        return "BestEffort"
    guaranteed = all(
        (one.get("limits") or {}).get(name) is not None and (one.get("requests") or {}).get(name) == one["limits"][name]
        for one in resources
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if guaranteed else "Burstable"


def asked(body: Object, kind: str, name: str) -> float:
    """What all containers of a pod ask for: `asked(pod, "requests", "memory")` in bytes."""
    return sum(
        quantity((container.get("resources") or {}).get(kind, {}).get(name, 0))
        for container in body["spec"]["containers"]
    )


def finished(body: Object) -> bool:
    """Whether a pod has reached its last phase."""
    return body.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _usage(resource: Resource, body: Object, hard: str) -> float | None:
    """What `body` takes of the quota's `hard`; None when it has nothing to do with it."""
    count = f"count/{statuses.full(resource.plural, resource.group)}"
    if hard == count:
        return 1
    if resource is not PODS:
        return 1 if hard == resource.plural else None
    if hard == "pods":
        return 0 if finished(body) else 1
    kind, _, name = hard.partition(".")
    if kind in ("requests", "limits"):
        return 0 if finished(body) else asked(body, kind, name)
    if hard in ("cpu", "memory", "ephemeral-storage"):
        return 0 if finished(body) else asked(body, "requests", hard)
    return None


def used(objects: Objects, namespace: str, hard: str, resources: Iterable[Resource]) -> float:
    """What the namespace's objects take of `hard`."""
    return sum(
        _usage(resource, stored.body, hard) or 0
        for resource in resources
        for stored in objects.list(resource, namespace)
    )


def check_quota(objects: Objects, resource: Resource, body: Object) -> None:
    """Raises Refusal (403) in the quota's words."""
    namespace = body["metadata"].get("namespace", "")
    for quota in objects.list(QUOTAS, namespace):
        over: list[tuple[str, float, float, str]] = []
        for hard, limit in (quota.body.get("spec", {}).get("hard") or {}).items():
            asks = _usage(resource, body, hard)
            if not asks:
                if resource is PODS and hard.startswith(("requests.", "limits.")) and asks == 0:
                    _must_specify(quota, body, hard)
                continue
            taken = used(objects, namespace, hard, [resource])
            if taken + asks > quantity(limit):
                over.append((hard, asks, taken, str(limit)))
        if over:
            parts = [
                ",".join(f"{hard}={plain(value)}" for hard, value in pairs)
                for pairs in (
                    [(hard, asks) for hard, asks, _, _ in over],
                    [(hard, taken) for hard, _, taken, _ in over],
                )
            ]
            limited = ",".join(f"{hard}={limit}" for hard, _, _, limit in over)
            why = f"exceeded quota: {quota.key[1]}, requested: {parts[0]}, used: {parts[1]}, limited: {limited}"
            raise statuses.forbidden(resource.plural, resource.group, body["metadata"]["name"], why)


def _must_specify(quota: Stored, body: Object, hard: str) -> None:
    lacking = ",".join(container["name"] for container in body["spec"]["containers"])
    why = f"failed quota: {quota.key[1]}: must specify {hard} for: {lacking}"
    raise statuses.forbidden("pods", "", body["metadata"]["name"], why)


def plain(value: float) -> str:
    """A number as a quota shows it: `3`, `250m`."""
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"
