"""Watches: the history of a resource as a stream, with all that makes clients stumble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.faults import Faults
from openforgerl.testing.fake_kubernetes.kinds import PODS, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Change, Objects, Stored
from openforgerl.testing.fake_kubernetes.scenarios import Scenarios
from openforgerl.testing.fake_kubernetes.selectors import Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a client asked for. `version` None: it named none. `seconds`: until the stream ends in peace."""

    resource: Resource
    namespace: str = ""
    selector: Selector | None = None
    version: int | None = None
    bookmarks: bool = False
    initial: bool = False
    """sendInitialEvents: everything there is, and then a bookmark that says so."""
    seconds: float = 1800.0

    def takes(self, stored: Stored | None) -> bool:
        """Whether the object belongs to this watch."""
        if stored is None or (self.namespace and stored.key[0] != self.namespace):
            return False
        return self.selector is None or self.selector(stored.body)


def line(kind: str, encoded: bytes) -> bytes:
    """One event of the stream."""
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), encoded)


class Watching:
    """The watches of one cluster."""

    def __init__(self, objects: Objects, scenarios: Scenarios, faults: Faults, scale: float) -> None:
        self._objects = objects
        self._scenarios = scenarios
        self._faults = faults
        self._scale = scale
        self._expired = 0
        """Raised to tell every open watch 410."""
        self._dropped = 0
        self._lost: dict[int, bool] = {}
        """Version → whether no watch sees it, drawn once for all."""
        self.open = 0

    def expire(self) -> None:
        """Tell every open watch that its version is too old, and end it."""
        self._expired += 1
        self._objects.wake()

    def drop(self) -> None:
        """End every open watch without a word."""
        self._dropped += 1
        self._objects.wake()

    def refuse(self, watch: Watch) -> statuses.Refusal | None:
        """What is wrong with a watch before it begins."""
        current, floor = self._objects.version, self._objects.floor(watch.resource)
        if watch.version is None and self._faults.unset_version_is_504:
            return statuses.version_too_large(current + 1, current)
        if watch.version is not None and watch.version > current:
            return statuses.version_too_large(watch.version, current)
        if watch.version is not None and 0 < watch.version < floor:
            return statuses.gone(watch.version, floor)
        return None

    async def stream(self, watch: Watch) -> AsyncGenerator[bytes]:
        """The lines of a watch until its time is over, or it is refused, dropped or expired."""
        refusal = self.refuse(watch)
        if refusal is not None:
            yield line("ERROR", msgspec.json.encode(refusal.body()))
            return
        self.open += 1
        try:
            async for one in self._lines(watch):
                yield one
        finally:
            self.open -= 1

    async def _lines(self, watch: Watch) -> AsyncGenerator[bytes]:
        version = watch.version or self._objects.version
        if not watch.version:
            everything = self._objects.list(watch.resource, watch.namespace)
            for stored in everything:
                if watch.takes(stored):
                    yield line("ADDED", stored.encoded)
            if watch.initial:
                yield self._bookmark(watch.resource, version, end_of_initial=True)
        ends, expired, dropped = time.monotonic() + watch.seconds, self._expired, self._dropped
        bookmark = time.monotonic() + self._faults.bookmark_every
        while True:
            news = self._objects.news(watch.resource)
            if self._dropped != dropped:
                return
            try:
                changes = self._objects.since(watch.resource, version)
            except statuses.Refusal as refusal:
                yield line("ERROR", msgspec.json.encode(refusal.body()))
                return
            if self._expired != expired:
                refusal = statuses.gone(version, self._objects.version)
                yield line("ERROR", msgspec.json.encode(refusal.body()))
                return
            for change in changes:
                version = change.version
                if (text := self._event(watch, change)) is not None:
                    await self._hold(watch.resource, change)
                    yield text
            now = time.monotonic()
            if watch.bookmarks and (now >= bookmark or now >= ends):
                bookmark = now + self._faults.bookmark_every
                yield self._bookmark(watch.resource, self._objects.version if not changes else version)
            if now >= ends:
                return
            if not changes:
                wait = min(ends, bookmark if watch.bookmarks else ends) - now
                try:
                    await asyncio.wait_for(news.wait(), max(wait, 0.0))
                except TimeoutError:
                    continue

    def _event(self, watch: Watch, change: Change) -> bytes | None:
        """The event that this watch makes of a change, if any: leaving a selector is a deletion."""
        kind, encoded = change.kind, change.now.encoded
        if change.kind == "DELETED":
            if not watch.takes(change.before):
                return None
        else:
            was, now = watch.takes(change.before), watch.takes(change.now)
            if not was and not now:
                return None
            kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
        return None if self._loses(watch.resource, change) else line(kind, encoded)

    def _loses(self, resource: Resource, change: Change) -> bool:
        if self._faults.lost_event_rate > 0:
            lost = self._lost.setdefault(change.version, self._faults.strikes(self._faults.lost_event_rate))
            if lost:
                return True
        planted = self._scenarios.planted.get(change.now.uid) if resource is PODS else None
        if planted is None or planted.scenario.watch != "lost" or not _ran(change.now.body):
            return False
        planted.struck = planted.struck or asyncio.get_running_loop().time()
        return True

    async def _hold(self, resource: Resource, change: Change) -> None:
        delay = self._faults.watch_delay
        planted = self._scenarios.planted.get(change.now.uid) if resource is PODS else None
        if planted is not None and planted.scenario.watch == "late" and _ran(change.now.body) and not planted.struck:
            # once for each pod: what comes behind it in the stream is late already
            planted.struck = asyncio.get_running_loop().time()
            delay += planted.scenario.watch_seconds * self._scale
        if delay:
            await asyncio.sleep(delay)

    def _bookmark(self, resource: Resource, version: int, *, end_of_initial: bool = False) -> bytes:
        metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if end_of_initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        body: Object = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return line("BOOKMARK", msgspec.json.encode(body))


def _ran(body: Object) -> bool:
    """Whether a container of the pod has ended."""
    return any("terminated" in one.get("state", {}) for one in body.get("status", {}).get("containerStatuses") or [])
