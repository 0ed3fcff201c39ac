"""The resources that the fake API server has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource. `fields`: field selectors beyond metadata.name and metadata.namespace."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    fields: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """`v1`, `batch/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def check_field(self, path: str) -> bool:
        """Whether a field selector may name `path`."""
        return path in ("metadata.name", "metadata.namespace", *self.fields)


_ABOUT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENT_FIELDS = (*(f"involvedObject.{name}" for name in _ABOUT), "reason", "type", "source", "reportingComponent")
_POD_FIELDS = ("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP")
_SANDBOXES = "extensions.agents.x-k8s.io"

PODS = Resource("pods", "Pod", fields=_POD_FIELDS)
EVENTS = Resource("events", "Event", fields=_EVENT_FIELDS)
NODES = Resource("nodes", "Node", namespaced=False, fields=("spec.unschedulable",))
NAMESPACES = Resource("namespaces", "Namespace", namespaced=False, fields=("status.phase",))
QUOTAS = Resource("resourcequotas", "ResourceQuota")
CONFIG_MAPS = Resource("configmaps", "ConfigMap")
SECRETS = Resource("secrets", "Secret", fields=("type",))
POLICIES = Resource("networkpolicies", "NetworkPolicy", "networking.k8s.io")
JOBS = Resource("jobs", "Job", "batch", fields=("status.successful",))
CLAIMS = Resource("sandboxclaims", "SandboxClaim", _SANDBOXES, "v1beta1")
TEMPLATES = Resource("sandboxtemplates", "SandboxTemplate", _SANDBOXES, "v1beta1")
SANDBOXES = Resource("sandboxes", "Sandbox", "agents.x-k8s.io", "v1beta1")
WARM_POOLS = Resource("sandboxwarmpools", "SandboxWarmPool", _SANDBOXES, "v1beta1")

RESOURCES = (
    PODS,
    EVENTS,
    NODES,
    NAMESPACES,
    QUOTAS,
    CONFIG_MAPS,
    SECRETS,
    JOBS,
    POLICIES,
    CLAIMS,
    TEMPLATES,
    WARM_POOLS,
    SANDBOXES,
    Resource("services", "Service"),
    Resource("serviceaccounts", "ServiceAccount"),
    Resource("persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("limitranges", "LimitRange"),
    Resource("leases", "Lease", "coordination.k8s.io"),
    Resource("deployments", "Deployment", "apps"),
    Resource("daemonsets", "DaemonSet", "apps"),
    Resource("roles", "Role", "rbac.authorization.k8s.io"),
    Resource("rolebindings", "RoleBinding", "rbac.authorization.k8s.io"),
    Resource("clusterroles", "ClusterRole", "rbac.authorization.k8s.io", namespaced=False),
    Resource("clusterrolebindings", "ClusterRoleBinding", "rbac.authorization.k8s.io", namespaced=False),
    Resource("priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False),
    Resource("runtimeclasses", "RuntimeClass", "node.k8s.io", namespaced=False),
    Resource("poddisruptionbudgets", "PodDisruptionBudget", "policy"),
    Resource("selfsubjectaccessreviews", "SelfSubjectAccessReview", "authorization.k8s.io", namespaced=False),
)
"""Every resource, by hand. Those without a controller here are only kept."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names. `name` and `subresource` may be empty."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def label(self) -> str:
        """`pods`, `pods/log`: how RBAC and the counters name it."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural


def find(group: str, version: str, plural: str) -> Resource | None:
    """The resource of that name, if there is one."""
    for resource in RESOURCES:
        if (resource.plural, resource.group, resource.version) == (plural, group, version):
            return resource
    return None


def parse(path: str) -> Target | None:
    """The target of an API path, or None for a path that names none."""
    parts = [part for part in path.split("/") if part]
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        return None
    resource = find(group, version, rest[0])
    if resource is None or (namespace and not resource.namespaced):
        return None
    if resource.namespaced and not namespace and len(rest) > 1:
        return None
    return Target(resource, namespace, *rest[1:])


def discovery(group: str, version: str) -> Object:
    """The `APIResourceList` of a group version."""
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    listed = [
        {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": verbs,
        }
        for resource in RESOURCES
        if (resource.group, resource.version) == (group, version)
    ]
    whole = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": whole, "resources": listed}


def groups() -> Object:
    """The `APIGroupList`."""
    named = dict.fromkeys((resource.group, resource.version) for resource in RESOURCES if resource.group)
    listed = [
        {
            "name": group,
            "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
            "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
        }
        for group, version in named
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
