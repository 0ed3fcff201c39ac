"""Creating, changing and deleting objects by the API server's rules."""

from __future__ import annotations

import base64
import secrets
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from openforgerl.testing.fake_kubernetes import admission, patches, statuses
from openforgerl.testing.fake_kubernetes.clock import Clock
from openforgerl.testing.fake_kubernetes.kinds import (
    EVENTS,
    NAMESPACES,
    PODS,
    QUOTAS,
    RESOURCES,
    SECRETS,
    Object,
    Resource,
)
from openforgerl.testing.fake_kubernetes.objects import Key, Objects, Stored, copy

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
_FREE_IN_PODS = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")


class DeleteOptions(msgspec.Struct, frozen=True, rename="camel"):
    """The body of a delete, as far as it is read."""

    grace_period_seconds: int | None = None
    propagation_policy: str = "Background"
    preconditions: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    dry_run: list[str] = msgspec.field(default_factory=list[str])


class Registry:
    """The rules. Every call happens at once: nothing here waits, so no other request can come between."""

    def __init__(self, objects: Objects, clock: Clock) -> None:
        self.objects = objects
        self.clock = clock

    def create(self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False) -> Stored:
        """A new object. Raises Refusal (400, 403 quota, 404 namespace, 409, 422)."""
        body = self._named(resource, namespace, body)
        metadata: dict[str, Any] = body["metadata"]
        if metadata.get("resourceVersion"):
            raise statuses.bad_request("resourceVersion should not be set on objects to be created")
        if resource.namespaced:
            within = self.objects.get(NAMESPACES, ("", namespace))
            if within.body["metadata"].get("deletionTimestamp") and resource is not EVENTS:
                why = f"unable to create new content in namespace {namespace} because it is being terminated"
                raise statuses.forbidden(resource.plural, resource.group, metadata["name"], why)
        admission.check(resource, body)
        if resource is PODS:
            admission.default_pod(body)
        if resource.namespaced:
            # before the duplicate is seen: a real server answers 403 here, and not 409
            admission.check_quota(self.objects, resource, body)
        if self.objects.find(resource, (metadata.get("namespace", ""), metadata["name"])) is not None:
            raise statuses.already_exists(resource.plural, resource.group, metadata["name"])
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.clock.now(), "generation": 1}
        return Stored(body, 0) if dry_run else self.objects.put(resource, body)

    def _named(self, resource: Resource, namespace: str, body: Object) -> Object:
        """`body` with kind, name and namespace, checked against the path's."""
        kind, api_version = body.get("kind", resource.kind), body.get("apiVersion", resource.api_version)
        if (kind, api_version) != (resource.kind, resource.api_version):
            message = (
                f"{api_version}, Kind={kind} does not match the expected {resource.api_version}, Kind={resource.kind}"
            )
            raise statuses.bad_request(f"the object provided is unrecognized: {message}")
        metadata = dict(body.get("metadata") or {})
        if not metadata.get("name") and metadata.get("generateName"):
            suffix = "".join(secrets.choice(_SUFFIX) for _ in range(5))
            metadata["name"] = metadata["generateName"] + suffix
        if not metadata.get("name"):
            raise statuses.invalid(resource.kind, resource.group, "", {"metadata.name": "Required value"})
        if resource.namespaced:
            if metadata.get("namespace", namespace) != namespace:
                raise statuses.bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            metadata["namespace"] = namespace
        if resource is NAMESPACES:  # the API server's own label, by which selectors find a namespace of that name
            labels = {**(metadata.get("labels") or {}), "kubernetes.io/metadata.name": metadata["name"]}
            metadata["labels"] = labels
        body = {**body, "kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        if resource is SECRETS and "stringData" in body:
            written = {key: base64.b64encode(text.encode()).decode() for key, text in body.pop("stringData").items()}
            body["data"] = {**(body.get("data") or {}), **written}
        return body

    def update(
        self, resource: Resource, key: Key, body: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Stored:
        """Replace an object, or with `subresource="status"` its status. Raises Refusal (400, 404, 409, 422)."""
        before = self.objects.get(resource, key)
        if body.get("metadata", {}).get("name", key[1]) != key[1]:
            raise statuses.bad_request("the name of the object does not match the name on the URL")
        body = self._named(resource, key[0], {**body, "metadata": {**body.get("metadata", {}), "name": key[1]}})
        old, new = before.body["metadata"], body["metadata"]
        if new.get("resourceVersion") and new["resourceVersion"] != old["resourceVersion"]:
            raise statuses.conflict(resource.plural, resource.group, key[1])
        if new.get("uid", old["uid"]) != old["uid"]:
            why = f"Precondition failed: UID in precondition: {new['uid']}, UID in object meta: {old['uid']}"
            raise statuses.conflict(resource.plural, resource.group, key[1], why)
        if subresource == "status":
            body = {**before.body, "status": body.get("status") or {}}
        else:
            fixed = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
            kept = {name: old[name] for name in (*fixed, "resourceVersion") if name in old}
            body = {**body, "metadata": {**new, **kept}}
            if "status" in before.body:
                body["status"] = before.body["status"]
            admission.check(resource, body)
            if resource is PODS:
                self._check_pod_update(before.body, body)
            if before.body.get("immutable") and _data(before.body) != _data(body):
                causes = {"data": "Forbidden: field is immutable when `immutable` is set"}
                raise statuses.invalid(resource.kind, resource.group, key[1], causes)
        if body == before.body:
            return before  # a change of nothing makes no version
        return Stored(body, 0) if dry_run else self._put(resource, body)

    def _check_pod_update(self, before: Object, after: Object) -> None:
        def fixed(body: Object) -> Object:
            spec = {name: value for name, value in body["spec"].items() if name not in _FREE_IN_PODS}
            containers = [{**container, "image": ""} for container in spec["containers"]]
            return {**spec, "containers": containers}

        if fixed(before) != fixed(after):
            causes = {"spec": "Forbidden: pod updates may not change fields other than image, deadline, tolerations"}
            raise statuses.invalid("Pod", "", after["metadata"]["name"], causes)

    def _put(self, resource: Resource, body: Object) -> Stored:
        """Store; and if the object only waited for its last finalizer, take it away."""
        stored = self.objects.put(resource, body)
        metadata = body["metadata"]
        waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0) > 0
        if metadata.get("deletionTimestamp") and not waits:
            return self.objects.remove(resource, stored.key)
        return stored

    def patch(
        self,
        resource: Resource,
        key: Key,
        patch: Any,
        content_type: str,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Stored:
        """Change part of an object. Raises Refusal (400, 404, 409, 415, 422)."""
        before = self.objects.get(resource, key)
        body = patches.apply(before.body, patch, content_type)
        return self.update(resource, key, body, subresource=subresource, dry_run=dry_run)

    def delete(
        self, resource: Resource, key: Key, options: DeleteOptions | None = None, *, dry_run: bool = False
    ) -> Stored:
        """Delete, or begin to; the object's last state. Raises Refusal (404, 409 precondition)."""
        options = options or DeleteOptions()
        before = self.objects.get(resource, key)
        self._check_preconditions(resource, before, options.preconditions)
        metadata = before.body["metadata"]
        finalizers = list(metadata.get("finalizers") or [])
        wanted = {"Foreground": FOREGROUND, "Orphan": ORPHAN}.get(options.propagation_policy)
        if wanted and wanted not in finalizers and not metadata.get("deletionTimestamp"):
            finalizers.append(wanted)
        grace = self._grace(resource, before.body, options.grace_period_seconds)
        if resource is NAMESPACES and "kubernetes" not in finalizers:
            finalizers.append("kubernetes")
        if dry_run or (not finalizers and not grace):
            return before if dry_run else self.objects.remove(resource, key)
        if metadata.get("deletionTimestamp") and metadata.get("deletionGracePeriodSeconds", 0) <= grace:
            return before  # a second delete can only shorten the first
        ends = (datetime.now(UTC) + timedelta(seconds=grace)).strftime("%Y-%m-%dT%H:%M:%SZ")
        dying: Object = {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace}
        if finalizers:
            dying["finalizers"] = finalizers
        body = {**before.body, "metadata": {**metadata, **dying}}
        if resource is NAMESPACES:
            body["status"] = {"phase": "Terminating"}
        return self.objects.put(resource, body)

    def _check_preconditions(self, resource: Resource, before: Stored, wanted: dict[str, str]) -> None:
        for name, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            has = before.body["metadata"][name]
            if wanted.get(name, has) != has:
                why = f"Precondition failed: {label} in precondition: {wanted[name]}, {label} in object meta: {has}"
                raise statuses.conflict(resource.plural, resource.group, before.key[1], why)

    def _grace(self, resource: Resource, body: Object, asked: int | None) -> int:
        if resource is not PODS or not body["spec"].get("nodeName") or admission.finished(body):
            return 0
        return body["spec"]["terminationGracePeriodSeconds"] if asked is None else max(0, asked)

    def bury(self, key: Key, uid: str) -> None:
        """The kubelet's last word: the pod `uid` has no containers any more and may go."""
        stored = self.objects.find(PODS, key)
        if stored is None or stored.uid != uid:
            return
        metadata = {**stored.body["metadata"], "deletionGracePeriodSeconds": 0}
        if metadata.get("finalizers"):
            self.objects.put(PODS, {**stored.body, "metadata": metadata})
        else:
            self.objects.remove(PODS, key)

    def set_status(self, resource: Resource, key: Key, uid: str, status: Object) -> bool:
        """A controller writes the status of the object `uid`; False when it is not there any more."""
        stored = self.objects.find(resource, key)
        if stored is None or stored.uid != uid:
            return False
        if stored.body.get("status") != status:
            self._put(resource, {**stored.body, "status": status})
        return True

    def bind(self, key: Key, uid: str, node: str, status: Object) -> bool:
        """The scheduler's: put the pod `uid` on a node; False when it is not there any more."""
        stored = self.objects.find(PODS, key)
        if stored is None or stored.uid != uid:
            return False
        spec = {**stored.body["spec"], "nodeName": node}
        self.objects.put(PODS, {**stored.body, "spec": spec, "status": status})
        return True

    def record(self, about: Stored, reason: str, message: str, *, warning: bool = False, source: str) -> None:
        """An Event about an object; the same words again only count up."""
        metadata = about.body["metadata"]
        namespace = metadata.get("namespace") or "default"
        fingerprint = f"{metadata['uid']}{reason}{message}"
        name = f"{metadata['name'][:200]}.{uuid.uuid5(uuid.NAMESPACE_OID, fingerprint).hex[:16]}"
        now = self.clock.now()
        known = self.objects.find(EVENTS, (namespace, name))
        if known is not None:
            again = {**known.body, "count": known.body["count"] + 1, "lastTimestamp": now}
            self.objects.put(EVENTS, again)
            return
        involved = {
            "kind": about.body["kind"],
            "apiVersion": about.body["apiVersion"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        }
        if metadata.get("namespace"):
            involved["namespace"] = namespace
        body: Object = {
            "kind": "Event",
            "apiVersion": "v1",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now,
            },
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": source},
            "reportingComponent": source,
        }
        self.objects.put(EVENTS, body)

    def shown(self, resource: Resource, stored: Stored) -> Stored:
        """As it is read: a quota's status is counted when somebody looks."""
        if resource is not QUOTAS:
            return stored
        hard: dict[str, Any] = stored.body.get("spec", {}).get("hard") or {}
        namespaced = [one for one in RESOURCES if one.namespaced]
        counted = {
            name: admission.plain(admission.used(self.objects, stored.key[0], name, namespaced)) for name in hard
        }
        body = copy(stored.body) | {"status": {"hard": hard, "used": counted}}
        return Stored(body, stored.version)


def _data(body: Object) -> Object:
    return {name: body.get(name) for name in ("data", "binaryData", "immutable")}
