"""Settings of the Kubernetes backend (config section `sandbox.kubernetes`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class Toleration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One toleration, spelled as the API spells it."""

    key: str | None = None
    """Taint key; None with `operator = "Exists"` tolerates all."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` compares `value`, `Exists` does not."""
    value: str | None = None
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Which effect is tolerated; None = all."""
    toleration_seconds: int | None = None
    """How long a NoExecute taint is tolerated."""


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which cluster, what pods are made of, how fast they are asked for, and how long each step may take."""

    kubeconfig: str = ""
    """Path of a kubeconfig; empty = `KUBECONFIG`, else the pod's own service account, else `~/.kube/config`."""
    context: str = ""
    """Context of the kubeconfig; empty = its current one."""
    namespace: str = ""
    """Where pods are made; empty = the context's, or the orchestrator's own inside the cluster."""
    warm_pool: str = ""
    """Name of an agent-sandbox `SandboxWarmPool` in the namespace, whose pods attempts claim where they fit. Others,
    verifiers' among them, are made as ever. `openforgerl images warm-pool` prints a pool."""
    more_namespaces: tuple[str, ...] = ()
    """Further namespaces, each with a quota of its own: a pod that one refuses for its quota is asked for in the next.
    Each needs the same rights, policies and secrets (`deploy/kubernetes/more`)."""
    image: str = ""
    """Image of a sandbox, by digest where possible. It needs /bin/sh, and a Python 3.9 or later at `python`."""
    registry: str = ""
    """Where `openforgerl images push` sent the images of tasks that we built (host/path)."""
    python: str = "/usr/bin/python3"
    """The interpreter that runs our init in the pod."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When the node pulls images."""
    pull_secrets: tuple[str, ...] = ()
    """Names of image pull secrets in the namespace."""
    layers: Literal["copy", "volume", "present", "host"] = "copy"
    """How harness layers arrive: an init container copies them from `layer_images`, an `image:` volume mounts them
    (Kubernetes 1.33 and containerd 2), they are in `image` already, or from the node's own disk (test clusters)."""
    layer_images: dict[str, str] = {}
    """Layer's path in the sandbox (`/opt/pi`) → image that holds it at the same path; for `copy` and `volume`."""
    architecture: Literal["amd64", "arm64"] = "amd64"
    """Of the nodes (label `kubernetes.io/arch`) and so of images and of our system-call filter."""
    node_selector: dict[str, str] = {}
    """Further labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Beyond those for a lost node, which are always there with `lost_node_timeout`."""
    priority_class: str = ""
    """PriorityClass of the pods; empty = the cluster's default."""
    runtime_class: str = ""
    """RuntimeClass of the pods (`gvisor`); empty = the cluster's default."""
    cpu_request: str = "250m"
    """CPU that the scheduler sets aside for a pod."""
    cpu_limit: str = ""
    """Most CPU of a pod; empty = none. (Memory and disk are bounded by the section `limits`.)"""
    writable: Literal["memory", "disk"] = "memory"
    """Writable directories: a tmpfs, bounded hard and counted as memory; or the node's disk, bounded by eviction."""
    user_namespaces: bool = False
    """Give each pod a user namespace (`hostUsers: false`, Kubernetes 1.33). Without one the processes of all pods on a
    node share uid 1000, so that their number is bounded by the kubelet's `podPidsLimit` alone."""
    gateway_host: str = ""
    """Address of this process as pods reach it; empty = `POD_IP`, else the address that faces the API server."""
    gateway_listen: str = ""
    """Address to listen on, where it is not `gateway_host` itself (`0.0.0.0` behind a Service)."""
    gateway_port: int = 0
    """Port that pods dial; 0 = any free one. A NetworkPolicy that opens it needs it fixed."""
    start_rate: float = 20.0
    """Pods asked for per second."""
    start_burst: int = 40
    """Pods that may be asked for at once before `start_rate` holds."""
    calls_at_once: int = 40
    """Requests to the API server at once (the watch apart)."""
    pending_at_once: int = 200
    """Most pods that are asked for and not yet running."""
    schedule_timeout: float = 600.0
    """Seconds that a pod may wait for a node (an autoscaler may be making one)."""
    pull_timeout: float = 600.0
    """Seconds that a pod may be without its image once the first pull has failed."""
    start_timeout: float = 300.0
    """Seconds from having a node to our init's dialling in, images being pulled meanwhile."""
    quota_timeout: float = 1800.0
    """Seconds that a pod may be refused by a ResourceQuota. Waiting is all that is done about it."""
    lost_node_timeout: float = 30.0
    """Seconds that a pod's node may be out of reach until its attempt is given up (the cluster's default is 300)."""
    reconnect_timeout: float = 120.0
    """Seconds that a sandbox goes on by itself when its connection to us is broken, and we wait for it to come back."""
    deadline: int = 7200
    """`activeDeadlineSeconds` of a pod: the end that the cluster itself makes, whatever becomes of us."""
    grace: int = 5
    """Seconds between TERM and KILL when a pod is deleted."""
    relist_seconds: float = 300.0
    """The watch is checked against a whole list at least so often."""
    lease_seconds: int = 60
    """A run whose owner has not renewed its Lease for so long may be reaped by anybody."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value: object = getattr(self, field.name)
            least = 0 if field.name in ("gateway_port", "grace") else 1e-9
            if isinstance(value, int | float) and not isinstance(value, bool) and value < least:
                raise ValueError(f"sandbox.kubernetes.{field.name} must be {'0 or more' if least == 0 else 'above 0'}")
        if len({self.namespace, *self.more_namespaces}) != 1 + len(self.more_namespaces) or "" in self.more_namespaces:
            raise ValueError(
                "sandbox.kubernetes.more_namespaces must name other namespaces than `namespace`, each once"
            )
        if self.gateway_port > 65535:
            raise ValueError(f"sandbox.kubernetes.gateway_port must be at most 65535; got {self.gateway_port}")
