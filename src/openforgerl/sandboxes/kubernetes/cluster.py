"""What is asked of an API server: one protocol of a dozen calls, over plain JSON objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Object = dict[str, Any]
"""A Kubernetes object as the API's JSON has it."""


class Kind(NamedTuple):
    """A namespaced resource: its API root (`/api/v1`), its plural, and the words that a manifest carries."""

    root: str
    plural: str
    api_version: str
    kind: str

    @property
    def group(self) -> str:
        """API group; empty for the core one."""
        return self.api_version.rpartition("/")[0]


POD = Kind("/api/v1", "pods", "v1", "Pod")
CONFIG_MAP = Kind("/api/v1", "configmaps", "v1", "ConfigMap")
EVENT = Kind("/api/v1", "events", "v1", "Event")
QUOTA = Kind("/api/v1", "resourcequotas", "v1", "ResourceQuota")
LEASE = Kind("/apis/coordination.k8s.io/v1", "leases", "coordination.k8s.io/v1", "Lease")
NETWORK_POLICY = Kind("/apis/networking.k8s.io/v1", "networkpolicies", "networking.k8s.io/v1", "NetworkPolicy")

QUOTA_MESSAGE = "exceeded quota"
"""The one sign by which a 403 of a ResourceQuota differs from one of missing rights (the admission plugin's words)."""


class ClusterError(OSError):
    """The API server refused or did not answer. An OSError, because to an attempt that is what it is.

    `status` is the HTTP status, 0 when there was no answer; `reason` the API's own word (`AlreadyExists`, ...) or
    empty; `retry_after` in seconds, where the server said it.
    """

    def __init__(self, message: str, *, status: int = 0, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after
        self.doubtful = False
        """An earlier try of the same request got no answer, or a server's error: it may have been done."""

    @property
    def absent(self) -> bool:
        """The object is not there."""
        return self.status == 404

    @property
    def exists(self) -> bool:
        """Another object has this name already (409 also says "changed meanwhile")."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def expired(self) -> bool:
        """A watch must begin again with a list: its resourceVersion is too old, or, just after a restart, too new."""
        return self.status == 410 or (self.status == 504 and self.reason == "Timeout")

    @property
    def over_quota(self) -> bool:
        """A ResourceQuota is full: wait."""
        return self.status == 403 and QUOTA_MESSAGE in str(self)

    @property
    def passing(self) -> bool:
        """The same request may well succeed later. (A name that is taken, or missing rights, will not change.)"""
        return self.status in (0, 429) or self.status >= 500


class Listing(NamedTuple):
    """A list and the point in time from which a watch goes on."""

    items: list[Object]
    resource_version: str


class Event(NamedTuple):
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    object: Object


class Cluster(Protocol):
    """One namespace of one cluster. Every call may raise ClusterError; passing ones were retried already."""

    @property
    def namespace(self) -> str: ...

    @property
    def server(self) -> str:
        """Base URL of the API server."""
        ...

    async def version(self) -> str:
        """`gitVersion` of the server."""
        ...

    async def create(self, kind: Kind, manifest: Object, *, dry_run: bool = False) -> Object:
        """Make it; with `dry_run` only find out whether it would be made."""
        ...

    async def get(self, kind: Kind, name: str) -> Object: ...

    async def list(self, kind: Kind, *, labels: str = "", fields: str = "") -> Listing: ...

    def watch(self, kind: Kind, *, labels: str, resource_version: str, seconds: float) -> AsyncGenerator[Event]:
        """Changes since `resource_version`, bookmarks among them, for about `seconds`.

        Ends by itself when the server ends it. Raises ClusterError; its `expired` says to list again.
        """
        ...

    async def patch(self, kind: Kind, name: str, change: Object) -> Object:
        """JSON merge patch."""
        ...

    async def delete(self, kind: Kind, name: str, *, uid: str, grace: int | None = None) -> bool:
        """Ask for an object's end; False when it is not there (or is another one by now)."""
        ...

    async def delete_all(self, kind: Kind, *, labels: str, grace: int | None = None) -> None: ...

    async def log_tail(self, pod: str, *, container: str, bytes_: int) -> str:
        """The last bytes of a container's output; empty when there is none to be had. For evidence, never for data."""
        ...

    async def may(self, verb: str, kind: Kind, *, subresource: str = "") -> bool:
        """SelfSubjectAccessReview."""
        ...

    def beside(self, namespace: str) -> Cluster:
        """Another namespace of the same cluster, over the same connections; only the first is closed."""
        ...

    async def close(self) -> None: ...


def selector(labels: Mapping[str, str]) -> str:
    """Equality selector, `a=b,c=d`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def conditions(pod: Object) -> dict[str, Object]:
    """Condition type → condition."""
    found: Sequence[Object] = pod.get("status", {}).get("conditions") or ()
    return {condition["type"]: condition for condition in found}
