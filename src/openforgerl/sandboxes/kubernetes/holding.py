"""Holding a run in one namespace: the ConfigMap that owns its pods there, and the Lease that says its owner lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from datetime import datetime

from openforgerl.errors import StoreError
from openforgerl.sandboxes.kubernetes import manifests, names
from openforgerl.sandboxes.kubernetes.cluster import CONFIG_MAP, LEASE, Cluster, ClusterError, Kind, Object

log = logging.getLogger(__name__)

_TRIES = 5
"""How often an object is asked for that comes and goes under our hands."""
_PAUSE = 0.2


class RunHold:
    """The run's ConfigMap and Lease in one namespace while this process works on the run.

    `home` names the run folder and the machine that it is on: two processes of one home are told apart by the lock of
    the folder's database, those of different homes by the Lease alone.
    """

    def __init__(self, cluster: Cluster, run_id: str, lease_seconds: int, home: str) -> None:
        self._cluster = cluster
        self._run_id = run_id
        self._lease_seconds = lease_seconds
        self._home = home
        self._holder = f"{socket.gethostname()}-{os.getpid()}"
        self._renewing: asyncio.Task[None] | None = None
        self._lease: Object = {}
        self._new = False
        self._lost = False
        self.owner: Object = {}
        self.init_map = ""
        """Name of the ConfigMap that brings our init into pods: the owner, or beside it where that brings another."""

    async def take(self) -> None:
        """Make both, or take over what an earlier process of this run left: its pods go on hanging on it.

        Raises ClusterError; StoreError when another process works on the run.
        """
        bundle = await asyncio.to_thread(manifests.init_bundle)
        self.owner, self._new = await self._found_or_made(CONFIG_MAP, manifests.run_map(self._run_id, bundle))
        self._lease = await self._take_lease()
        self._renewing = asyncio.create_task(self._renew())
        wanted = manifests.init_map(self._run_id, bundle, self.owner)
        if self.owner.get("binaryData") == wanted["binaryData"]:
            self.init_map = self.owner["metadata"]["name"]
        else:  # it cannot be changed, and to delete it would delete every pod that hangs on it
            beside, _ = await self._found_or_made(CONFIG_MAP, wanted)
            self.init_map = beside["metadata"]["name"]

    async def release(self) -> None:
        """Give the run up: the ConfigMap goes, and with it whatever hangs on it. Not what another took over."""
        await self._stop()
        if not self._lost:
            for kind, item in ((LEASE, self._lease), (CONFIG_MAP, self.owner)):
                if item:
                    await self._cluster.delete(kind, item["metadata"]["name"], uid=item["metadata"]["uid"])

    async def abandon(self) -> None:
        """Undo a `take` that did not come to its end. What was there before stays: pods hang on it."""
        await self._stop()
        if self._new:
            with contextlib.suppress(ClusterError):  # a reaper finds it
                await self.release()

    async def _stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
            self._renewing = None

    async def _found_or_made(self, kind: Kind, wanted: Object) -> tuple[Object, bool]:
        """(the object of this name, whether it was made now). Only 404 means that there is none."""
        name = wanted["metadata"]["name"]
        for _ in range(_TRIES):
            try:
                return await self._cluster.create(kind, wanted), True
            except ClusterError as error:
                if not error.exists:
                    raise
            there = await _look(self._cluster, kind, name)
            if there is not None and not there["metadata"].get("deletionTimestamp"):
                return there, False
            await asyncio.sleep(_PAUSE)
        raise ClusterError(f"{kind.kind} {name} is being deleted, and does not go")

    async def _take_lease(self) -> Object:
        for _ in range(_TRIES):
            there = await free_lease(self._cluster, self._run_id, self._home)
            wanted = manifests.lease(
                self._run_id, self._holder, self._lease_seconds, self.owner, time.time(), home=self._home
            )
            try:
                if there is None:
                    return await self._cluster.create(LEASE, wanted)
                # Of two that take it over at once the version lets one through.
                wanted["metadata"]["resourceVersion"] = there["metadata"]["resourceVersion"]
                return await self._cluster.patch(LEASE, wanted["metadata"]["name"], wanted)
            except ClusterError as error:
                if error.status not in (404, 409):
                    raise
            await asyncio.sleep(_PAUSE)
        raise ClusterError(f"the Lease of run {self._run_id} changes whenever it is to be taken")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            metadata = self._lease["metadata"]
            change: Object = {
                "metadata": {"resourceVersion": metadata["resourceVersion"]},
                "spec": {"renewTime": manifests.micro_time(time.time())},
            }
            try:
                self._lease = await self._cluster.patch(LEASE, metadata["name"], change)
            except ClusterError as error:
                if error.status in (404, 409):
                    await self._look_after()
                else:
                    log.warning("the run's Lease could not be renewed; others may reap the run: %s", error)
            if self._lost:
                log.error("run %s was taken over by another process: this one holds it no longer", self._run_id)
                return

    async def _look_after(self) -> None:
        """Somebody has changed or deleted the Lease."""
        try:
            there = await _look(self._cluster, LEASE, self._lease["metadata"]["name"])
            if there is None:
                self._lease = await self._take_lease()
            elif there["spec"].get("holderIdentity") == self._holder:
                self._lease = there
            else:
                self._lost = True
        except StoreError:
            self._lost = True
        except ClusterError as error:
            log.warning("the run's Lease cannot be seen; others may reap the run: %s", error)


async def free_lease(cluster: Cluster, run_id: str, home: str) -> Object | None:
    """The run's Lease, once nobody else can hold it; None without one. Raises StoreError when another renews it.

    Ours are those of this home. Another's counts as dead when it has run out, by its own time or because it was not
    renewed while we looked on for so long: clocks differ. That of the same folder on another machine (the pod of a Job,
    replaced) need not be looked at for so long, because the folder's database keeps two apart as well.
    """
    begun, seen = time.monotonic(), ""
    while True:
        there = await _look(cluster, LEASE, names.run_object(run_id))
        if there is None:
            return None
        whose, spec = str((there["metadata"].get("annotations") or {}).get(names.HOME_NOTE) or ""), there["spec"]
        seconds = float(spec.get("leaseDurationSeconds") or 0)
        looked = time.monotonic() - begun
        enough = seconds / 2 if whose.rpartition("/")[2] == home.rpartition("/")[2] else seconds
        if whose == home:
            return there
        if seen and seen != str(spec.get("renewTime")):
            raise StoreError(
                f"run {run_id} is being worked on by another process ({spec.get('holderIdentity')}), which renews its "
                f"Lease {there['metadata']['name']} in namespace {cluster.namespace}: stop that one, or use another "
                "run folder or namespace"
            )
        if overdue(spec, time.time()) or (seen and looked >= enough):
            return there
        if not seen:
            log.warning(
                "run %s was held by %s until just now: waiting up to %.0f s to see whether that lives",
                run_id,
                spec.get("holderIdentity"),
                enough,
            )
        seen = str(spec["renewTime"])
        await asyncio.sleep(min(1.0, seconds / 6))


def overdue(spec: Object, now: float) -> bool:
    """Whether a Lease has run out at `now` (Unix seconds); one without a time has."""
    try:
        renewed = datetime.fromisoformat(str(spec["renewTime"])).timestamp()
    except (KeyError, ValueError):
        return True
    return now > renewed + float(spec.get("leaseDurationSeconds") or 0)


async def _look(cluster: Cluster, kind: Kind, name: str) -> Object | None:
    try:
        return await cluster.get(kind, name)
    except ClusterError as error:
        if error.absent:
            return None
        raise
