"""The controllers that take away: what an owner leaves behind, and what is in a namespace that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.kinds import NAMESPACES, RESOURCES, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Change, Key, Objects, Stored
from openforgerl.testing.fake_kubernetes.registry import FOREGROUND, ORPHAN, DeleteOptions, Registry

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Collector:
    """Deletes what names an owner that is not there, as the controller-manager does."""

    def __init__(self, objects: Objects, registry: Registry, clock: Clock, timings: Timings, spawn: Spawn) -> None:
        self._objects = objects
        self._registry = registry
        self._clock = clock
        self._timings = timings
        self._spawn = spawn
        self._alive: dict[str, tuple[Resource, Key]] = {}
        self._dependents: dict[str, set[tuple[Resource, Key, str]]] = {}
        """Owner's uid → the objects that name it, each with its own uid."""
        objects.listeners.append(self._noticed)

    def _noticed(self, resource: Resource, change: Change) -> None:
        now, uid = change.now, change.now.uid
        entry = (resource, now.key, uid)
        before = _owners(change.before.body) if change.before is not None else set[str]()
        after = _owners(now.body) if change.kind != "DELETED" else set[str]()
        for owner in before - after:
            self._dependents.get(owner, set()).discard(entry)
            self._finalize(owner)
        for owner in after - before:
            self._dependents.setdefault(owner, set()).add(entry)
            if owner not in self._alive:
                self._spawn(self._collect(owner))
        if change.kind == "DELETED":
            self._alive.pop(uid, None)
            if self._dependents.get(uid):
                self._spawn(self._collect(uid))
            if now.key[0]:
                self._empty_namespace(now.key[0])
            return
        self._alive[uid] = (resource, now.key)
        started = not (change.before and change.before.body["metadata"].get("deletionTimestamp"))
        if now.body["metadata"].get("deletionTimestamp") and started:
            self._spawn(self._dying(resource, now))

    async def _collect(self, owner: str) -> None:
        """After a moment, delete whatever names nobody but owners that are gone."""
        await self._clock.sleep(self._timings.collect)
        for resource, key, uid in sorted(self._dependents.get(owner, ()), key=lambda entry: entry[1]):
            stored = self._objects.find(resource, key)
            if stored is None or stored.uid != uid:
                continue
            if not any(other in self._alive for other in _owners(stored.body)):
                self._registry.delete(resource, key, DeleteOptions(preconditions={"uid": uid}))

    async def _dying(self, resource: Resource, stored: Stored) -> None:
        """Somebody deletes an object that has finalizers of ours."""
        await self._clock.sleep(self._timings.collect / 4)
        finalizers = stored.body["metadata"].get("finalizers") or []
        if resource is NAMESPACES:
            for other in RESOURCES:
                for inside in self._objects.list(other, stored.key[1]) if other.namespaced else []:
                    self._registry.delete(other, inside.key)
            self._empty_namespace(stored.key[1])
        if ORPHAN in finalizers:
            for other, key, _ in list(self._dependents.get(stored.uid, ())):
                self._disown(other, key, stored.uid)
            self._drop_finalizer(resource, stored.key, ORPHAN)
        if FOREGROUND in finalizers:
            for other, key, uid in sorted(self._dependents.get(stored.uid, ()), key=lambda entry: entry[1]):
                if (found := self._objects.find(other, key)) is not None and found.uid == uid:
                    self._registry.delete(other, key)
            self._finalize(stored.uid)

    def _finalize(self, owner: str) -> None:
        """A foreground deletion ends when the last dependent is gone."""
        found = self._alive.get(owner)
        if found is None or self._dependents.get(owner):
            return
        stored = self._objects.find(*found)
        if stored is not None and stored.body["metadata"].get("deletionTimestamp"):
            self._drop_finalizer(*found, FOREGROUND)

    def _empty_namespace(self, name: str) -> None:
        namespace = self._objects.find(NAMESPACES, ("", name))
        if namespace is None or not namespace.body["metadata"].get("deletionTimestamp"):
            return
        if not any(self._objects.list(resource, name) for resource in RESOURCES if resource.namespaced):
            self._drop_finalizer(NAMESPACES, ("", name), "kubernetes")

    def _drop_finalizer(self, resource: Resource, key: Key, finalizer: str) -> None:
        def without(metadata: Object) -> Object:
            return {**metadata, "finalizers": [one for one in metadata.get("finalizers") or [] if one != finalizer]}

        self._rewrite(resource, key, without)

    def _disown(self, resource: Resource, key: Key, owner: str) -> None:
        def without(metadata: Object) -> Object:
            return {**metadata, "ownerReferences": [one for one in metadata["ownerReferences"] if one["uid"] != owner]}

        self._rewrite(resource, key, without)

    def _rewrite(self, resource: Resource, key: Key, change: Callable[[Object], Object]) -> None:
        stored = self._objects.find(resource, key)
        if stored is not None:
            self._registry.update(resource, key, {**stored.body, "metadata": change(stored.body["metadata"])})


def _owners(body: Object) -> set[str]:
    return {owner["uid"] for owner in body["metadata"].get("ownerReferences") or []}
