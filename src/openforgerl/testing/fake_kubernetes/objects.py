"""The database behind the API server: objects, their versions, and the history that watches read."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

import msgspec

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.kinds import Object, Resource

ChangeKind = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]
"""(namespace, name); the namespace of a cluster's object is empty."""


class Stored:
    """One version of one object. `body` is never changed: an update is a new `Stored`."""

    __slots__ = ("_encoded", "body", "version")

    def __init__(self, body: Object, version: int) -> None:
        self.body = body
        self.version = version
        self._encoded = b""

    @property
    def encoded(self) -> bytes:
        """As JSON; made once."""
        if not self._encoded:
            self._encoded = msgspec.json.encode(self.body)
        return self._encoded

    @property
    def key(self) -> Key:
        """Its namespace and name."""
        metadata = self.body["metadata"]
        return metadata.get("namespace", ""), metadata["name"]

    @property
    def uid(self) -> str:
        """The object's, the same in all its versions."""
        return self.body["metadata"]["uid"]


class Change(msgspec.Struct, frozen=True):
    """One entry of the history."""

    version: int
    kind: ChangeKind
    now: Stored
    before: Stored | None


Listener = Callable[[Resource, Change], None]


def copy(body: Object) -> Object:
    """A deep copy of a JSON object."""
    return msgspec.json.decode(msgspec.json.encode(body))


class Objects:
    """Everything that the cluster has. One counter of versions for all resources, as etcd has it.

    `keep`: changes of each resource that are remembered; what is older is compacted.
    """

    def __init__(self, keep: int = 200_000) -> None:
        self.version = 1000
        self.listeners: list[Listener] = []
        self._keep = keep
        self._objects: dict[Resource, dict[Key, Stored]] = {}
        self._history: dict[Resource, list[Change]] = {}
        self._floors: dict[Resource, int] = {}
        self._compacted = 0
        self._news: dict[Resource, asyncio.Event] = {}

    def find(self, resource: Resource, key: Key) -> Stored | None:
        """The object, if it is there."""
        return self._objects.get(resource, {}).get(key)

    def get(self, resource: Resource, key: Key) -> Stored:
        """The object. Raises Refusal (404)."""
        found = self.find(resource, key)
        if found is None:
            raise statuses.not_found(resource.plural, resource.group, key[1])
        return found

    def list(self, resource: Resource, namespace: str = "") -> list[Stored]:
        """All objects of a resource, in a namespace or everywhere, by namespace and name."""
        found = self._objects.get(resource, {})
        keys = sorted(key for key in found if not namespace or key[0] == namespace)
        return [found[key] for key in keys]

    def put(self, resource: Resource, body: Object) -> Stored:
        """Store a new version of `body`, which is ours from now on. Its resourceVersion is set here."""
        before = self.find(resource, (body["metadata"].get("namespace", ""), body["metadata"]["name"]))
        self.version += 1
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self.version)}
        now = Stored(body, self.version)
        self._objects.setdefault(resource, {})[now.key] = now
        self._record(resource, Change(self.version, "ADDED" if before is None else "MODIFIED", now, before))
        return now

    def remove(self, resource: Resource, key: Key) -> Stored:
        """Take it away; its last state, with the version of the removal. Raises Refusal (404)."""
        before = self.get(resource, key)
        del self._objects[resource][key]
        self.version += 1
        metadata = {**before.body["metadata"], "resourceVersion": str(self.version)}
        now = Stored({**before.body, "metadata": metadata}, self.version)
        self._record(resource, Change(self.version, "DELETED", now, before))
        return now

    def _record(self, resource: Resource, change: Change) -> None:
        history = self._history.setdefault(resource, [])
        history.append(change)
        if len(history) > self._keep:
            half = len(history) // 2
            self._floors[resource] = history[half - 1].version
            del history[:half]
        for listener in self.listeners:
            listener(resource, change)
        self.wake(resource)

    def wake(self, resource: Resource | None = None) -> None:
        """Let every watch of a resource (or of all) look again."""
        for name in [resource] if resource is not None else list(self._news):
            event = self._news.pop(name, None)
            if event is not None:
                event.set()

    def news(self, resource: Resource) -> asyncio.Event:
        """Set at the next change of `resource`."""
        return self._news.setdefault(resource, asyncio.Event())

    def since(self, resource: Resource, version: int, most: int = 1000) -> list[Change]:
        """The changes after `version`, oldest first, `most` at once. Raises Refusal (410) when some are gone."""
        floor = self.floor(resource)
        if version < floor:
            raise statuses.gone(version, floor)
        history = self._history.get(resource)
        if not history or history[-1].version <= version:
            return []
        start = bisect_right(history, version, key=lambda change: change.version)
        return history[start : start + most]

    def compact(self) -> None:
        """Forget the history: a watch or a page from before now is answered with 410."""
        self._history.clear()
        self._compacted = self.version
        self.wake()

    def floor(self, resource: Resource) -> int:
        """The oldest version from which a watch can start."""
        return max(self._compacted, self._floors.get(resource, 0))
