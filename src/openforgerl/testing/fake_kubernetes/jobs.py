"""The Job controller, as far as a Job is one pod: it makes it, tells how it ended, and goes when its time is over.

Bare pods have no time to live: whoever makes them deletes them. Not played: parallelism, retries, indexes, suspension.
"""

from __future__ import annotations

from typing import Any

from openforgerl.testing.fake_kubernetes import admission
from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.collecting import Spawn
from openforgerl.testing.fake_kubernetes.kinds import JOBS, PODS, Object, Resource
from openforgerl.testing.fake_kubernetes.objects import Change, Key, Stored
from openforgerl.testing.fake_kubernetes.registry import DeleteOptions, Registry
from openforgerl.testing.fake_kubernetes.statuses import Refusal


class Jobs:
    """Watches Jobs and their pods."""

    def __init__(self, registry: Registry, clock: Clock, timings: Timings, spawn: Spawn) -> None:
        self._registry = registry
        self._clock = clock
        self._timings = timings
        self._spawn = spawn
        registry.objects.listeners.append(self._noticed)

    def _noticed(self, resource: Resource, change: Change) -> None:
        if resource is JOBS and change.kind == "ADDED" and change.now.body.get("spec", {}).get("template"):
            self._spawn(self._begin(change.now))
        elif resource is PODS and change.kind == "MODIFIED" and _has_just_finished(change):
            for owner in change.now.body["metadata"].get("ownerReferences") or []:
                if owner["kind"] == "Job":
                    self._spawn(self._finish((change.now.key[0], owner["name"]), owner["uid"], change.now))

    async def _begin(self, job: Stored) -> None:
        await self._clock.sleep(self._timings.schedule)
        namespace, name = job.key
        template: Object = job.body["spec"]["template"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job.uid, "controller": True}
        labels = {**(template.get("metadata", {}).get("labels") or {}), "batch.kubernetes.io/job-name": name}
        metadata = {**template.get("metadata", {}), "labels": labels, "ownerReferences": [owner]}
        body: Object = {"metadata": {**metadata, "generateName": f"{name}-"}, "spec": template["spec"]}
        try:
            self._registry.create(PODS, namespace, body)
        except Refusal as refusal:
            why = f"Error creating: {refusal.message}"
            self._registry.record(job, "FailedCreate", why, warning=True, source="job-controller")
            return
        self._tell(job.key, job.uid, {"active": 1, "ready": 0, "startTime": self._clock.now()})

    async def _finish(self, key: Key, uid: str, pod: Stored) -> None:
        succeeded = pod.body["status"]["phase"] == "Succeeded"
        now = self._clock.now()
        kind = "Complete" if succeeded else "Failed"
        condition = {"type": kind, "status": "True", "lastTransitionTime": now}
        condition |= {} if succeeded else {"reason": "BackoffLimitExceeded"}
        status: dict[str, Any] = {"conditions": [condition]}
        status |= {"succeeded": 1, "completionTime": now} if succeeded else {"failed": 1}
        if not self._tell(key, uid, status):
            return
        stored = self._registry.objects.get(JOBS, key)
        seconds = stored.body["spec"].get("ttlSecondsAfterFinished")
        if seconds is None:
            return
        await self._clock.sleep_promised(seconds)
        found = self._registry.objects.find(JOBS, key)
        if found is not None and found.uid == uid:
            self._registry.delete(JOBS, key, DeleteOptions(preconditions={"uid": uid}))

    def _tell(self, key: Key, uid: str, status: Object) -> bool:
        return self._registry.set_status(JOBS, key, uid, status)


def _has_just_finished(change: Change) -> bool:
    before = change.before
    return admission.finished(change.now.body) and (before is None or not admission.finished(before.body))
