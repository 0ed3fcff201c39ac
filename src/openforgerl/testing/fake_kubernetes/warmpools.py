"""The controllers of agent-sandbox (0.5, v1beta1), as far as claims of warm pods need them.

What is played: pools kept full, claims that adopt a ready sandbox or, where there is none, get one made; the claim's
metadata on the running pod, labels only of the domains that are allowed; a pod that is made anew whenever it is gone
while its sandbox is there; ends by `shutdownTime`. Not: services, volume claims, environment, suspension, staleness.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime
from typing import Any

from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.collecting import Spawn
from openforgerl.testing.fake_kubernetes.kinds import (
    CLAIMS,
    PODS,
    SANDBOXES,
    TEMPLATES,
    WARM_POOLS,
    Object,
    Resource,
)
from openforgerl.testing.fake_kubernetes.objects import Change, Key, Stored
from openforgerl.testing.fake_kubernetes.registry import DeleteOptions, Registry

CLAIM_UID, SANDBOX_NAME = "agents.x-k8s.io/claim-uid", "agents.x-k8s.io/sandbox-name"
_RESERVED = ("agents.x-k8s.io/", "extensions.agents.x-k8s.io/")
"""Beginnings of keys that are not passed on to pods."""
ALLOWED_DOMAINS = ("sandbox.users.io",)
"""Of labels that a claim may set: the controller's default."""


class WarmPools:
    """Watches pools, claims, sandboxes and their pods."""

    def __init__(self, registry: Registry, clock: Clock, timings: Timings, spawn: Spawn) -> None:
        self._registry = registry
        self._objects = registry.objects
        self._clock = clock
        self._timings = timings
        self._spawn = spawn
        registry.objects.listeners.append(self._noticed)

    def _noticed(self, resource: Resource, change: Change) -> None:
        now = change.now
        owner = _controller(now.body)
        if resource is WARM_POOLS and change.kind != "DELETED":
            self._spawn(self._fill(now.key))
        elif resource is CLAIMS and change.kind == "ADDED":
            self._spawn(self._bind(now))
            self._spawn(self._expire(now))
        elif resource is SANDBOXES:
            if change.kind == "DELETED" and owner.get("kind") == "SandboxWarmPool":
                self._spawn(self._fill((now.key[0], owner["name"])))
            elif change.kind != "DELETED":
                self._spawn(self._follow(now.key, now.uid))
        elif resource is PODS and owner.get("kind") == "Sandbox":
            self._spawn(self._follow((now.key[0], owner["name"]), owner["uid"]))

    async def _fill(self, key: Key) -> None:
        """Make sandboxes until the pool has its number."""
        await self._clock.sleep(self._timings.schedule)
        pool = self._objects.find(WARM_POOLS, key)
        if pool is None:
            return
        template = self._objects.find(TEMPLATES, (key[0], pool.body["spec"]["sandboxTemplateRef"]["name"]))
        owned = [one for one in self._objects.list(SANDBOXES, key[0]) if _controller(one.body).get("uid") == pool.uid]
        if template is None:
            return
        for _ in range(pool.body["spec"].get("replicas", 1) - len(owned)):
            self._make(key[0], f"{key[1]}-{secrets.token_hex(3)}", template, pool, "SandboxWarmPool")

    def _make(self, namespace: str, name: str, template: Stored, owner: Stored, kind: str) -> Stored:
        reference = _reference(owner, kind)
        body: Object = {
            "metadata": {"name": name, "ownerReferences": [reference]},
            "spec": {"podTemplate": template.body["spec"]["podTemplate"]},
        }
        return self._registry.create(SANDBOXES, namespace, body)

    async def _bind(self, claim: Stored) -> None:
        """Give a claim the oldest ready sandbox of its pool, or a new one."""
        await self._clock.sleep(self._timings.schedule)
        namespace, name = claim.key
        found = self._objects.find(CLAIMS, claim.key)
        if found is None or found.uid != claim.uid:
            return
        wanted = claim.body["spec"].get("additionalPodMetadata") or {}
        refused = [label for label in wanted.get("labels") or {} if label.partition("/")[0] not in ALLOWED_DOMAINS]
        pool = self._objects.find(WARM_POOLS, (namespace, claim.body["spec"]["warmPoolRef"]["name"]))
        if refused or pool is None:
            domain = refused[0].partition("/")[0] if refused else ""
            why = f'label domain "{domain}" is not in the allowlist' if refused else "SandboxWarmPool not found"
            reason = "InvalidMetadata" if refused else "WarmPoolNotFound"
            self._tell(found, {"conditions": [_ready("False", reason, why)]})
            return
        warm = [one for one in self._objects.list(SANDBOXES, namespace) if self._is_warm(one, pool)]
        if warm:
            chosen = warm[0]
        else:
            template = self._objects.get(TEMPLATES, (namespace, pool.body["spec"]["sandboxTemplateRef"]["name"]))
            chosen = self._make(namespace, name, template, claim, "SandboxClaim")
        before: Object = chosen.body["spec"]["podTemplate"]
        metadata = before.get("metadata") or {}
        labels = {**(metadata.get("labels") or {}), **(wanted.get("labels") or {}), CLAIM_UID: claim.uid}
        notes = {**(metadata.get("annotations") or {}), **(wanted.get("annotations") or {})}
        template_now = {**before, "metadata": {**metadata, "labels": labels, "annotations": notes}}
        body = {
            **chosen.body,
            "metadata": {**chosen.body["metadata"], "ownerReferences": [_reference(claim, "SandboxClaim")]},
            "spec": {**chosen.body["spec"], "podTemplate": template_now},
        }
        self._objects.put(SANDBOXES, body)
        self._tell(found, {"sandbox": {"name": chosen.key[1]}, "conditions": [_ready("True", "Bound", "")]})
        self._spawn(self._fill(pool.key))

    def _is_warm(self, sandbox: Stored, pool: Stored) -> bool:
        pod = self._objects.find(PODS, sandbox.key)
        return _controller(sandbox.body).get("uid") == pool.uid and pod is not None and _runs(pod.body)

    def _tell(self, claim: Stored, status: Object) -> None:
        notes = dict(claim.body["metadata"].get("annotations") or {})
        if "sandbox" in status:
            notes[SANDBOX_NAME] = status["sandbox"]["name"]
        metadata = {**claim.body["metadata"], "annotations": notes}
        self._objects.put(CLAIMS, {**claim.body, "metadata": metadata, "status": status})

    async def _follow(self, key: Key, uid: str) -> None:
        """A sandbox has one pod, with the metadata of its template; one that is gone is made anew."""
        await self._clock.sleep(self._timings.schedule)
        sandbox = self._objects.find(SANDBOXES, key)
        if sandbox is None or sandbox.uid != uid or sandbox.body["metadata"].get("deletionTimestamp"):
            return
        template: Object = sandbox.body["spec"]["podTemplate"]
        wanted = {
            name: {key: value for key, value in given.items() if not key.startswith(_RESERVED)}
            for name, given in (template.get("metadata") or {}).items()
        }
        pod = self._objects.find(PODS, key)
        if pod is None:
            metadata = {**wanted, "name": key[1], "ownerReferences": [_reference(sandbox, "Sandbox")]}
            self._registry.create(PODS, key[0], {"metadata": metadata, "spec": template["spec"]})
            return
        there = pod.body["metadata"]
        labels = {**(there.get("labels") or {}), **(wanted.get("labels") or {})}
        notes = {**(there.get("annotations") or {}), **(wanted.get("annotations") or {})}
        if (labels, notes) != (there.get("labels") or {}, there.get("annotations") or {}):
            self._objects.put(PODS, {**pod.body, "metadata": {**there, "labels": labels, "annotations": notes}})

    async def _expire(self, claim: Stored) -> None:
        lifecycle: dict[str, Any] = claim.body["spec"].get("lifecycle") or {}
        if lifecycle.get("shutdownPolicy") != "Delete" or "shutdownTime" not in lifecycle:
            return
        until = datetime.fromisoformat(lifecycle["shutdownTime"].replace("Z", "+00:00"))
        await asyncio.sleep(max(0.0, (until - datetime.now(UTC)).total_seconds()))
        found = self._objects.find(CLAIMS, claim.key)
        if found is not None and found.uid == claim.uid:
            self._registry.delete(CLAIMS, claim.key, DeleteOptions(preconditions={"uid": claim.uid}))


def _controller(body: Object) -> Object:
    """The owner that controls an object; empty for none."""
    owners: list[Object] = body["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def _reference(owner: Stored, kind: str) -> Object:
    api = owner.body["apiVersion"]
    return {"apiVersion": api, "kind": kind, "name": owner.key[1], "uid": owner.uid, "controller": True}


def _runs(pod: Object) -> bool:
    deleted = pod["metadata"].get("deletionTimestamp")
    return not deleted and (pod.get("status") or {}).get("phase") == "Running"


def _ready(status: str, reason: str, message: str) -> Object:
    return {"type": "Ready", "status": status, "reason": reason, "message": message}
