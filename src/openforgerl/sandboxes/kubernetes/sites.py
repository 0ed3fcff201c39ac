"""The namespaces of a run, each opened when the first pod is to be made or found there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from openforgerl.errors import StageError, StoreError
from openforgerl.sandboxes.kubernetes import names
from openforgerl.sandboxes.kubernetes.cluster import Cluster, ClusterError, selector
from openforgerl.sandboxes.kubernetes.holding import RunHold
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.kubernetes.watching import PodWatch
from openforgerl.types import Origin, Stage


class Site:
    """A run in one namespace: what its pods there hang on, and the watch of them. An object of one namespace cannot
    own one of another, so each has its own."""

    def __init__(self, cluster: Cluster, hold: RunHold, watch: PodWatch) -> None:
        self.cluster = cluster
        self.hold = hold
        self.watch = watch

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    async def close(self) -> None:
        """Give the run up here: what is left of its pods goes with its ConfigMap."""
        await self.watch.close()
        await self.hold.release()


class Sites:
    """All sites of a run. The first is where a run with one namespace has everything."""

    def __init__(self, clusters: Sequence[Cluster], run_id: str, home: str, options: KubernetesOptions) -> None:
        self._clusters = {cluster.namespace: cluster for cluster in clusters}
        self._run_id = run_id
        self._home = home
        self._options = options
        self._opening: dict[str, asyncio.Task[Site]] = {}
        self.roomy = next(iter(self._clusters))
        """The namespace that took the last pod: the next is asked for there first."""

    def __len__(self) -> int:
        return len(self._clusters)

    def __contains__(self, namespace: object) -> bool:
        return namespace in self._clusters

    def after(self, namespace: str) -> str:
        """The namespace to ask when `namespace` has no room; itself when there is no other."""
        known = list(self._clusters)
        return known[(known.index(namespace) + 1) % len(known)]

    async def open(self, namespace: str) -> Site:
        """The site of one of the run's namespaces. Raises StageError with what keeps it from being opened.

        Whoever gives up meanwhile leaves the opening to the others, and to `close`.
        """
        task = self._opening.get(namespace)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._opening[namespace] = asyncio.create_task(self._begin(self._clusters[namespace]))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close every site, and see to it that none is opened any more. Raises ClusterError when one is left behind:
        its Lease runs out, and a reaper does the rest."""
        tasks = list(self._opening.values())
        self._opening.clear()
        for task in tasks:
            task.cancel()  # one that is done stays as it is
        if tasks:
            await asyncio.wait(tasks)
        async with contextlib.AsyncExitStack() as stack:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    stack.push_async_callback(task.result().close)

    async def _begin(self, cluster: Cluster) -> Site:
        options = self._options
        hold = RunHold(cluster, self._run_id, options.lease_seconds, self._home)
        labels = selector(names.run_labels(self._run_id))
        watch = PodWatch(cluster, labels, relist_seconds=options.relist_seconds)
        try:
            await hold.take()
            await watch.start()
        except BaseException as error:
            await watch.close()
            await hold.abandon()
            if isinstance(error, StoreError):
                raise _failed("run_taken", str(error), retryable=False) from error
            if isinstance(error, ClusterError):
                where = f"in namespace {cluster.namespace} (`openforgerl doctor --kubernetes` says why): {error}"
                kind = "api_unavailable" if error.passing else "api_refused"
                text = f"the run's own objects cannot be made {where}"
                raise _failed(kind, text, retryable=error.passing) from error
            raise
        return Site(cluster, hold, watch)


def _failed(kind: str, message: str, *, retryable: bool) -> StageError:
    return StageError(Stage.SANDBOX, kind, message, origin=Origin.INFRASTRUCTURE, retryable=retryable)
