"""One list and one watch for all pods of a run; each pod's own news goes to whoever asked for them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing

from openforgerl.errors import InputError
from openforgerl.sandboxes.kubernetes.cluster import POD, Cluster, ClusterError, Object

log = logging.getLogger(__name__)

WATCH_SECONDS = 240.0
"""How long the server is asked to keep one watch; the client waits a little longer for a byte before it gives up."""

_WELL = 30.0
"""A watch that lasted so many seconds has not failed at once again."""


class News:
    """What is known of one pod. One reader; it misses intermediate states and never the last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pod: Object | None = None
        self.gone = False
        """It was there, and is no more."""
        self.uid = ""
        """Of the pod that is meant; another of that name is not. Empty until it is made."""
        self.since = float("inf")
        """Monotonic time at which it is known to exist: a list begun later must show it."""
        self._changed = asyncio.Event()

    async def change(self, timeout: float | None = None) -> None:
        """Return when something changed since the last call, or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self._changed.clear()

    def concerns(self, pod: Object) -> bool:
        """Whether an object of this name is the pod that is meant."""
        return not self.uid or pod["metadata"]["uid"] == self.uid

    def made(self, pod: Object) -> None:
        """The server has answered that it exists. What the watch said of it meanwhile is newer."""
        self.uid = pod["metadata"]["uid"]
        self.since = time.monotonic()
        if self.pod is None or self.pod["metadata"]["uid"] != self.uid:
            self.pod, self.gone = pod, False
        self.tell()

    def tell(self) -> None:
        """Wake the reader."""
        self._changed.set()


class PodWatch:
    """Runs from `start` to `close`. Whatever the API server does, it lists again and goes on."""

    def __init__(self, cluster: Cluster, labels: str, *, relist_seconds: float, first_pause: float = 0.5) -> None:
        self._cluster = cluster
        self._labels = labels
        self._relist_seconds = relist_seconds
        self._first_pause = first_pause
        self._known: dict[str, News] = {}
        self._task: asyncio.Task[None] | None = None
        self.lists = 0
        """How often everything was listed, for tests and reports."""

    async def start(self) -> None:
        """Begin with a list, and return after it. Raises ClusterError where that one is refused: what cannot be listed
        once is not waited for. Later ones are tried again and again, because pods live meanwhile."""
        if self._task is None:
            version = await self._list()
            self._task = asyncio.create_task(self._run(version))

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def follow(self, name: str) -> News:
        """News of the pod `name`, from before it is made until `leave`. InputError when somebody follows it already."""
        if name in self._known:
            raise InputError(f"pod {name} is in use: an attempt has one sandbox at a time under one attempt id")
        news = self._known[name] = News(name)
        return news

    def leave(self, name: str) -> None:
        """No longer of interest."""
        self._known.pop(name, None)

    async def _run(self, version: str) -> None:
        failures = 0
        while True:
            begun = time.monotonic()
            try:
                version = version or await self._list()
                await self._watch(version)
                failures = 0
            except ClusterError as error:
                # What is known stays known: a server that does not answer has deleted nothing.
                failures = 0 if time.monotonic() - begun > _WELL else failures
                pause = random.uniform(0.5, 1.0) * min(30.0, self._first_pause * 2**failures)
                pause = max(0.0 if error.status == 410 and not failures else pause, error.retry_after or 0.0)
                failures += 1
                level = logging.INFO if error.passing or error.expired else logging.WARNING  # a right, say
                log.log(level, "the watch of %s begins again in %.1f s: %s", self._labels, pause, error)
                await asyncio.sleep(pause)
            version = ""

    async def _list(self) -> str:
        """List all; a pod that was there and is not listed has been deleted while nobody looked."""
        begun = time.monotonic()
        listing = await self._cluster.list(POD, labels=self._labels)
        self.lists += 1
        present = {pod["metadata"]["name"]: pod for pod in listing.items}
        for name, news in list(self._known.items()):
            pod = present.get(name)
            if pod is not None and news.concerns(pod):
                news.pod = pod
                news.tell()
            elif news.since < begun and not news.gone:
                news.gone = True
                news.tell()
        return listing.resource_version

    async def _watch(self, version: str) -> None:
        """Watch from `version` until a whole list is due again."""
        until = time.monotonic() + self._relist_seconds
        while (left := until - time.monotonic()) > 0:
            begun = time.monotonic()
            watch = self._cluster.watch(
                POD, labels=self._labels, resource_version=version, seconds=min(WATCH_SECONDS, max(left, 1.0))
            )
            async with aclosing(watch) as events:
                async for event in events:
                    version = event.object["metadata"]["resourceVersion"]
                    if event.kind != "BOOKMARK":
                        self._take(event.kind, event.object)
            if time.monotonic() - begun < 1.0:  # a server that ends every watch at once must not be hammered
                await asyncio.sleep(1.0)

    def _take(self, kind: str, pod: Object) -> None:
        news = self._known.get(pod["metadata"]["name"])
        if news is None or not news.concerns(pod):
            return
        news.pod = pod
        if kind == "DELETED":
            news.gone = True
        elif not news.uid:
            news.gone = False  # a successor of the same name
        news.tell()
