"""One pod from the request for it to the proof that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

import msgspec

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes.credentials import Credentials
from openforgerl.sandboxes.kubernetes import classification
from openforgerl.sandboxes.kubernetes.classification import CONTAINER, Ended, Lost, Running, Waiting
from openforgerl.sandboxes.kubernetes.cluster import POD, ClusterError, Object
from openforgerl.sandboxes.kubernetes.gateway import Gateway, Stream
from openforgerl.sandboxes.kubernetes.names import NONCE_NOTE
from openforgerl.sandboxes.kubernetes.options import KubernetesOptions
from openforgerl.sandboxes.kubernetes.pace import Room, TokenBucket
from openforgerl.sandboxes.kubernetes.sites import Site, Sites
from openforgerl.sandboxes.kubernetes.watching import News
from openforgerl.types import Failure, Origin, Stage

log = logging.getLogger(__name__)

_TAIL_BYTES = 2048
_QUOTA_PAUSES = (0.5, 15.0)
"""Seconds between two requests that a quota refuses: first and longest."""
_VERIFIER_PAUSE = 2.0
"""Longest for a verifier's pod."""
_LOOK_AGAIN = 4.0
"""Beyond its grace, longest wait for news of a pod that is being removed before the server is asked itself."""


class Facility:
    """What all pods of a run share."""

    def __init__(self, sites: Sites, gateway: Gateway, options: KubernetesOptions) -> None:
        self.sites = sites
        self.gateway = gateway
        self.options = options
        self.starts = TokenBucket(options.start_rate, options.start_burst)
        self.pending = asyncio.Semaphore(options.pending_at_once)
        self.room = Room()
        """Told whenever a pod of ours has gone: a quota may have room again."""
        self.refused_verifiers = 0
        """Pods of verifiers that a quota refuses now. An agent's pod is held until its state is graded, so room goes to
        verifiers first: else agents take all of it, and none of them can end."""
        self._in_use: set[str] = set()

    def claim(self, name: str) -> None:
        """Take a pod's name, in whatever namespace. InputError when somebody has it already."""
        if name in self._in_use:
            raise InputError(f"pod {name} is in use: an attempt has one sandbox at a time under one attempt id")
        self._in_use.add(name)

    def leave(self, name: str) -> None:
        """Give the name back."""
        self._in_use.discard(name)


class PodLife:
    """Make it, wait for its init, notice its end, remove it."""

    def __init__(self, facility: Facility, site: Site, name: str, credentials: Credentials) -> None:
        facility.claim(name)
        self._facility = facility
        self._options = facility.options
        self.name = name
        self.credentials = credentials
        self.site = site
        """Where it is, or is asked for next."""
        self.news: News = site.watch.follow(name)
        self._stream: Stream | None = None
        self._arrived = asyncio.Event()
        self.failure: Failure | None = None
        """Why it ended, once that is known."""
        self._failed = asyncio.Event()
        self._forced = False
        self._watching: asyncio.Task[None] | None = None
        self.on_stream: Callable[[Stream], None] | None = None
        """Takes every connection that its init makes after the first."""
        self.seconds: dict[str, float] = {}
        """Stage → how long it took: `schedule` until it had a node, `pull_and_start` until its init dialled in."""

    async def board(self, manifest: Callable[[Site], Object], *, verifier: bool = False) -> Stream:
        """Ask for the pod and wait until its init has dialled in. Raises StageError with what kept it from that.

        `manifest`: of the pod in one namespace, which depends on what the run has there. `verifier`: it grades.
        """
        self._facility.gateway.expect(self.name, self.credentials, self._take_stream)
        try:
            async with contextlib.AsyncExitStack() as place:
                await self._create(manifest, place, verifier)
                stream = await self._await_init()
        except ClusterError as error:
            raise _refused(error) from error
        self._watching = asyncio.create_task(self._notice())
        return stream

    async def rejoin(self, pod: Object) -> Stream:
        """Wait for the init of a pod that an earlier process made."""
        self._facility.gateway.expect(self.name, self.credentials, self._take_stream)
        self.news.made(pod)
        stream = await self._await_init()
        self._watching = asyncio.create_task(self._notice())
        return stream

    async def failed(self, timeout: float) -> Failure | None:
        """Why it ended; None when nothing says that it did, within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._failed.wait()
        if self.failure is None and self.news.uid:
            await self._ask()
        return self.failure

    async def _ask(self) -> None:
        """The watch says nothing, and something is wrong: ask the server itself, once."""
        try:
            pod = await self.site.cluster.get(POD, self.name)
        except ClusterError as error:
            if error.absent:
                self.failure = classification.deleted(self.news.pod)
            return
        reading = classification.read(pod)
        if isinstance(reading, Ended) and self.news.concerns(pod):
            self.failure, self.news.pod = reading.failure, pod

    async def ended(self) -> None:
        """Wait until it has failed."""
        await self._failed.wait()

    async def remove(self, seconds: float) -> bool:
        """Close the door to its init, delete it, and see it gone; False when it is still there after `seconds`.

        Its object is taken away by force only where its node is out of reach; what runs there is fenced.
        """
        self._facility.gateway.forget(self.name)
        if self._stream is not None:  # whoever should have taken it may have been stopped before
            self._stream[1].transport.abort()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        try:
            return await self._remove(seconds)
        except ClusterError as error:
            log.warning("pod %s could not be removed now, the reaper will: %s", self.name, error)
            return False
        finally:
            self.site.watch.leave(self.name)
            self._facility.leave(self.name)
            self._facility.room.freed()

    async def evidence(self) -> dict[str, str]:
        """What there is to say about a pod that failed, gathered while it still exists."""
        pod = self.news.pod
        if pod is None:
            return {}
        status: Object = pod.get("status", {})
        said = {"pod": self.name, "phase": str(status.get("phase")), "node": str(pod["spec"].get("nodeName") or "none")}
        statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        said["containers"] = "; ".join(f"{item['name']}: {item.get('state')}" for item in statuses)
        if any("terminated" in (item.get("state") or {}) for item in statuses) and not self.news.gone:
            said["log"] = await self.site.cluster.log_tail(self.name, container=CONTAINER, bytes_=_TAIL_BYTES)
        return said

    def _take_stream(self, stream: Stream) -> None:
        if self.on_stream is not None:
            self.on_stream(stream)
            return
        if self._stream is not None:
            self._stream[1].transport.abort()
        self._stream = stream
        self._arrived.set()
        self.news.tell()

    async def _create(
        self, manifest: Callable[[Site], Object], place: contextlib.AsyncExitStack, verifier: bool
    ) -> None:
        """POST until it is there. A quota is waited for; a name that is taken is ours, or a predecessor's to remove.

        `place`: gets one of the places of pods that are asked for and do not run yet; who waits for room has none.
        """
        started, refusals, pause = time.monotonic(), 0, _QUOTA_PAUSES[0]
        facility, sites = self._facility, self._facility.sites
        try:
            while True:
                while facility.refused_verifiers and not verifier:
                    self._see_patience(time.monotonic() - started, "its run's verifiers go first")
                    await facility.room.wait(_spread(_QUOTA_PAUSES[1]), first=False)
                await place.enter_async_context(facility.pending)
                if not refusals:
                    await facility.starts.take()
                refusal = await self._ask_for(manifest(self.site), started)
                if refusal is None:
                    return
                await place.aclose()
                self._see_patience(time.monotonic() - started, str(refusal))
                refusals += 1
                facility.refused_verifiers += verifier and refusals == 1
                if refusals % len(sites) == 0:
                    longest = min(pause, _VERIFIER_PAUSE) if verifier else pause
                    await facility.room.wait(_spread(longest), first=verifier)
                    pause = min(2 * pause, _QUOTA_PAUSES[1])
                if len(sites) > 1:
                    self._move(await sites.open(sites.after(self.site.namespace)))
        finally:
            facility.refused_verifiers -= verifier and refusals > 0
            if verifier:
                facility.room.freed()  # for whoever let it go first

    async def _ask_for(self, wanted: Object, started: float) -> ClusterError | None:
        """POST; a quota's refusal, or None when it is there. Raises ClusterError, StageError."""
        while True:
            try:
                self.news.made(await self.site.cluster.create(POD, wanted))
                break
            except ClusterError as error:
                # A server looks at quotas first, and the answer of the request that made it may have been lost.
                if (error.exists or (error.over_quota and error.doubtful)) and await self._is_mine(wanted):
                    break
                if error.over_quota:
                    return error
                if not error.exists:
                    raise
                waited = time.monotonic() - started
                if waited > self._options.quota_timeout + self._options.start_timeout:
                    raise _error("start_timeout", f"a pod of its name does not go for {waited:.0f} s") from error
        self._facility.sites.roomy = self.site.namespace
        return None

    def _see_patience(self, waited: float, why: str) -> None:
        if waited > self._options.quota_timeout:
            raise _error("quota", f"refused by a quota for {waited:.0f} s: {why}")

    def _move(self, site: Site) -> None:
        """It is not made yet, and will be asked for there."""
        self.site.watch.leave(self.name)
        self.site, self.news = site, site.watch.follow(self.name)

    async def _is_mine(self, manifest: Object) -> bool:
        """Whether the pod of this name is the one asked for; a predecessor is removed first."""
        cluster = self.site.cluster
        try:
            there = await cluster.get(POD, self.name)
        except ClusterError as error:
            if error.absent:
                return False
            raise
        wanted = manifest["metadata"]["annotations"][NONCE_NOTE]
        if there["metadata"].get("annotations", {}).get(NONCE_NOTE) == wanted:
            self.news.made(there)
            return True
        await cluster.delete(POD, self.name, uid=there["metadata"]["uid"], grace=0)
        self.news.uid = there["metadata"]["uid"]
        await self._until_gone(time.monotonic() + _LOOK_AGAIN + self._options.grace)
        self.news.uid, self.news.gone, self.news.since = "", False, float("inf")
        return False

    async def _await_init(self) -> Stream:
        """Until it dials, or something says that it will not."""
        options = self._options
        patience = {"schedule": options.schedule_timeout, "pull": options.pull_timeout, "start": options.start_timeout}
        begun: dict[str, float] = {}
        made = time.monotonic()
        while self._stream is None:
            waiting = self._still_waiting()
            if isinstance(waiting, Failure):
                raise await self._ended(waiting)
            now = time.monotonic()
            since = begun.setdefault(waiting.patience, now)
            left = since + patience[waiting.patience] - now
            if left <= 0:
                raise await self._ended(classification.overdue(await self._told_now(waiting), now - since))
            await self.news.change(left)
        now = time.monotonic()
        # Whichever of them was seen first: the watch misses intermediate states.
        placed = min(begun.get("start", now), begun.get("pull", now))
        self.seconds = {"schedule": placed - made, "pull_and_start": now - placed}
        return self._stream

    async def _told_now(self, waiting: Waiting) -> Waiting:
        """What it waits for in the server's own words: of a claim that has no pod yet a watch of pods says nothing."""
        try:
            reading = classification.read(await self.site.cluster.get(POD, self.name))
        except ClusterError:
            return waiting  # what the watch said will do
        return reading if isinstance(reading, Waiting) else waiting

    def _still_waiting(self) -> Waiting | Failure:
        """What it waits for, or why it waits in vain."""
        if self.news.gone:
            return classification.deleted(self.news.pod)
        assert self.news.pod is not None
        match classification.read(self.news.pod):
            case Waiting() as waiting:
                return waiting
            case Ended(failure=failure):
                return failure
            case Lost():
                return Waiting(patience="start", kind="node_lost", message="its node is out of reach")
            case Running():
                address = f"{self._options.gateway_host or 'the gateway'}:{self._facility.gateway.port}"
                text = f"its init runs and has not reached {address}: see gateway_host and the NetworkPolicies"
                return Waiting(patience="start", kind="gateway_unreachable", message=text)

    async def _notice(self) -> None:
        """Follow it while its sandbox is in use; what ends it is kept in `failure`."""
        lost_at: float | None = None
        while self.failure is None:
            reading = classification.read(self.news.pod) if self.news.pod is not None else Running()
            now = time.monotonic()
            lost_at = (lost_at or now) if isinstance(reading, Lost) else None
            if self.news.gone:
                self.failure = classification.deleted(self.news.pod)
            elif isinstance(reading, Ended):
                self.failure = reading.failure
            elif lost_at is not None and now - lost_at >= self._options.lost_node_timeout:
                self.failure = classification.lost(now - lost_at)
            else:
                await self.news.change(None if lost_at is None else lost_at + self._options.lost_node_timeout - now)
        self._facility.gateway.forget(self.name)
        self._failed.set()

    async def _ended(self, failure: Failure) -> StageError:
        return _stage_error(msgspec.structs.replace(failure, evidence={**await self.evidence(), **failure.evidence}))

    async def _remove(self, seconds: float) -> bool:
        cluster, until = self.site.cluster, time.monotonic() + seconds
        if not self.news.uid:  # the answer to its creation never came, so ask
            try:
                self.news.made(await cluster.get(POD, self.name))
            except ClusterError as error:
                if error.absent:
                    return True
                raise
        if self.news.gone or not await cluster.delete(POD, self.name, uid=self.news.uid, grace=self._options.grace):
            return True
        while not await self._until_gone(until):
            if self._forced or not self._is_lost():
                return False
            log.warning(
                "pod %s is on a lost node: its object is removed by force, what runs there is fenced", self.name
            )
            self._forced = True
            await cluster.delete(POD, self.name, uid=self.news.uid, grace=0)
        return True

    def _is_lost(self) -> bool:
        return self.news.pod is not None and isinstance(classification.read(self.news.pod), Lost)

    async def _until_gone(self, until: float) -> bool:
        """By the watch; where that says nothing for long, by asking. On a lost node nothing will ever come."""
        while not self.news.gone:
            left = until - time.monotonic()
            if left <= 0 or (self._is_lost() and not self._forced):
                return False
            before = self.news.pod
            await self.news.change(min(left, self._options.grace + _LOOK_AGAIN))
            if self.news.pod is before and not self.news.gone:
                try:
                    there = await self.site.cluster.get(POD, self.name)
                    self.news.gone = there["metadata"]["uid"] != self.news.uid
                except ClusterError as error:
                    if not error.absent:
                        raise
                    self.news.gone = True
        return True


def _spread(seconds: float) -> float:
    """Those that were refused together do not come back as one."""
    return random.uniform(0.5, 1.0) * seconds


def _refused(error: ClusterError) -> StageError:
    """The API server's no as the attempt's failure. What is not passing will be refused again."""
    kind = "api_unavailable" if error.passing else "api_refused"
    return _error(kind, str(error), retryable=error.passing)


def _error(kind: str, message: str, *, retryable: bool = True) -> StageError:
    return StageError(Stage.SANDBOX, kind, message, origin=Origin.INFRASTRUCTURE, retryable=retryable)


def _stage_error(failure: Failure) -> StageError:
    return StageError(
        failure.stage,
        failure.kind,
        failure.message,
        origin=failure.origin,
        retryable=failure.retryable,
        evidence=dict(failure.evidence),
    )
