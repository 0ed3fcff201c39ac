"""Warm pods: an attempt claims one of an agent-sandbox pool, where the pool has what it needs; else one is made for it.

`ClaimingCluster` stands before the API server and shows each claim with the pod that it was given as the pod that was
asked for: under the name of the attempt, and with its nonce as uid. What else handles pods need not know of claims.

A warm pod was made before anybody knew its attempt, so its init waits for a file of the downward API
(`inside/claimed.py`). The claim's annotations, which agent-sandbox copies to the pod, bring it where to dial and the
first credential, which is dead as soon as init was handed the second (`credentials.py`): an agent that reads the file,
or a pod that the controller makes anew for the same claim, gets in with it no more.
https://github.com/kubernetes-sigs/agent-sandbox, API extensions.agents.x-k8s.io/v1beta1.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

from openforgerl.errors import ConfigError
from openforgerl.sandboxes.kubernetes import manifests, names
from openforgerl.sandboxes.kubernetes.classification import CONTAINER
from openforgerl.sandboxes.kubernetes.cluster import POD, Cluster, ClusterError, Event, Kind, Listing, Object, selector
from openforgerl.sandboxes.spec import INIT_HOME

log = logging.getLogger(__name__)

_GROUP = "extensions.agents.x-k8s.io/v1beta1"
CLAIM = Kind(f"/apis/{_GROUP}", "sandboxclaims", _GROUP, "SandboxClaim")
POOL = Kind(f"/apis/{_GROUP}", "sandboxwarmpools", _GROUP, "SandboxWarmPool")
TEMPLATE = Kind(f"/apis/{_GROUP}", "sandboxtemplates", _GROUP, "SandboxTemplate")

RUN_LABEL = "sandbox.users.io/openforgerl-run"
"""The run's label on pods. By default agent-sandbox lets a claim set labels of this domain and no others."""
DIAL_NOTE, TOKEN_NOTE, POD_NOTE = "openforgerl/dial", "openforgerl/token", "openforgerl/pod"
FITS_NOTE = "openforgerl/fits"
"""Annotation of a template: digest of what a pod must be made of to be one of its."""
_SANDBOX_NAME = "agents.x-k8s.io/sandbox-name"
CLAIM_VERBS = ("create", "get", "list", "delete", "deletecollection")
"""What a run does with claims (`deploy/kubernetes/warm-pool/rbac.yaml`)."""
CLAIM_DIRECTORY = "/.openforgerl-claim"
_WAIT = f"import sys; sys.path.insert(0, '{INIT_HOME}/{manifests.INIT_KEY}'); from inside.claimed import main; main()"


class ClaimingCluster:
    """`Cluster`, with the pods of one namespace claimed from `pool` where they fit."""

    def __init__(self, cluster: Cluster, pool: str) -> None:
        self._cluster = cluster
        self._pool = pool
        self._fits: str | None = None
        self._real: dict[str, str] = {}
        """Attempt's pod name → name of the pod that its claim was given."""
        self._claims: dict[str, str] = {}
        """Nonce → the claim's own uid."""
        self._told: set[str] = set()

    @property
    def namespace(self) -> str:
        return self._cluster.namespace

    @property
    def server(self) -> str:
        return self._cluster.server

    async def version(self) -> str:
        return await self._cluster.version()

    async def create(self, kind: Kind, manifest: Object, *, dry_run: bool = False) -> Object:
        """A pod is claimed where the pool's template fits. Raises ConfigError for a pool that cannot be used."""
        if kind is not POD or dry_run:
            return await self._cluster.create(kind, manifest, dry_run=dry_run)
        run = manifest["metadata"]["labels"][names.RUN_LABEL]
        if self._fits is None:
            self._fits = await self.fitting()
        digest = fingerprint(manifest)
        if digest == self._fits:
            return self._shown(await self._cluster.create(CLAIM, claim(manifest, self._pool)), None)
        if digest not in self._told and manifest["metadata"]["labels"].get(names.NETWORK_LABEL) == "proxy":
            log.warning(
                "pod %s is made and not claimed: warm pool %s does not fit it "
                "(`openforgerl images warm-pool` prints one that does)",
                manifest["metadata"]["name"],
                self._pool,
            )
        self._told.add(digest)
        labels = {**manifest["metadata"]["labels"], RUN_LABEL: run}
        return await self._cluster.create(POD, {**manifest, "metadata": {**manifest["metadata"], "labels": labels}})

    async def fitting(self) -> str:
        """The template's digest of what fits. Raises ConfigError for a pool that cannot be used."""
        where = f"sandbox.kubernetes.warm_pool: SandboxWarmPool {self.namespace}/{self._pool}"
        try:
            pool = await self._cluster.get(POOL, self._pool)
            template = await self._cluster.get(TEMPLATE, pool["spec"]["sandboxTemplateRef"]["name"])
        except ClusterError as error:
            if error.status not in (403, 404):
                raise
            raise ConfigError(
                f"{where}, or its SandboxTemplate, cannot be read ({error}): apply what `openforgerl images warm-pool` "
                "prints (agent-sandbox 0.5 or later must be installed), or leave warm_pool empty"
            ) from error
        if template["spec"].get("networkPolicyManagement") != "Unmanaged":
            raise ConfigError(
                f"{where}: its SandboxTemplate needs networkPolicyManagement: Unmanaged. Otherwise agent-sandbox adds "
                "a policy that lets its pods reach the internet, and policies add up"
            )
        return str((template["metadata"].get("annotations") or {}).get(FITS_NOTE, ""))

    async def get(self, kind: Kind, name: str) -> Object:
        """A claimed pod lasts as long as its claim or the pod that it was given."""
        if kind is not POD:
            return await self._cluster.get(kind, name)
        try:
            there = await self._cluster.get(CLAIM, name)
        except ClusterError as error:
            if not error.absent:
                raise
            pod = await self._cluster.get(POD, self._real.get(name, name))
            return _as_asked(pod)
        given = _given(there)
        try:
            pod = await self._cluster.get(POD, given) if given else None
        except ClusterError as error:
            if not error.absent:
                raise
            pod = None
        return self._shown(there, pod)

    async def list(self, kind: Kind, *, labels: str = "", fields: str = "") -> Listing:
        """Pods, and claims that have none yet."""
        if kind is not POD:
            return await self._cluster.list(kind, labels=labels, fields=fields)
        found = await self._cluster.list(POD, labels=_ours(labels), fields=fields)
        pods = [self._noted(pod) for pod in found.items]
        present = {pod["metadata"]["name"] for pod in pods}
        claims = await self._cluster.list(CLAIM, labels=labels)
        asked = [self._shown(one, None) for one in claims.items]
        waiting = [one for one in asked if one["metadata"]["name"] not in present]
        return Listing([*pods, *waiting], found.resource_version)

    async def watch(self, kind: Kind, *, labels: str, resource_version: str, seconds: float) -> AsyncGenerator[Event]:
        """A pod appears when its claim has been given one."""
        chosen = _ours(labels) if kind is POD else labels
        watch = self._cluster.watch(kind, labels=chosen, resource_version=resource_version, seconds=seconds)
        async with aclosing(watch) as events:
            async for event in events:
                if kind is not POD or event.kind == "BOOKMARK":
                    yield event
                    continue
                pod = self._noted(event.object)
                if event.kind == "DELETED":
                    self._real.pop(pod["metadata"]["name"], None)
                yield Event(event.kind, pod)

    async def patch(self, kind: Kind, name: str, change: Object) -> Object:
        return await self._cluster.patch(kind, name, change)

    async def delete(self, kind: Kind, name: str, *, uid: str, grace: int | None = None) -> bool:
        """With its claim a pod goes for good; deleted alone, agent-sandbox would make another in its place."""
        if kind is not POD:
            return await self._cluster.delete(kind, name, uid=uid, grace=grace)
        claimed = self._claims.get(uid) or await self._uid_of(name, uid)
        if claimed == "":
            return False
        real = self._real.get(name)
        if claimed is None and real is None:
            return await self._cluster.delete(POD, name, uid=uid, grace=grace)
        asked = claimed is not None and await self._cluster.delete(CLAIM, name, uid=claimed)
        if real is not None and grace == 0:  # its node is lost: only force takes its object away
            return await self._cluster.delete(POD, real, uid="", grace=0) or asked
        return asked or (real is not None and await self._lingers(name))

    async def _uid_of(self, name: str, nonce: str) -> str | None:
        """The uid of the claim of that name; None when there is none, empty when it is another's than `nonce` says."""
        try:
            there = await self._cluster.get(CLAIM, name)
        except ClusterError as error:
            if error.absent:
                return None
            raise
        shown = self._shown(there, None)
        return str(there["metadata"]["uid"]) if nonce in ("", shown["metadata"]["uid"]) else ""

    async def _lingers(self, name: str) -> bool:
        """Whether the pod of a claim that is gone is still there."""
        try:
            return bool(await self._cluster.get(POD, self._real[name]))
        except ClusterError as error:
            if error.absent:
                return False
            raise

    async def delete_all(self, kind: Kind, *, labels: str, grace: int | None = None) -> None:
        """Claims too; the pods that they were given do not have these labels, and go with them."""
        if kind is POD:
            await self._cluster.delete_all(CLAIM, labels=labels)
        await self._cluster.delete_all(kind, labels=labels, grace=grace)

    async def log_tail(self, pod: str, *, container: str, bytes_: int) -> str:
        return await self._cluster.log_tail(self._real.get(pod, pod), container=container, bytes_=bytes_)

    async def may(self, verb: str, kind: Kind, *, subresource: str = "") -> bool:
        return await self._cluster.may(verb, kind, subresource=subresource)

    def beside(self, namespace: str) -> Cluster:
        """A pool is of one namespace."""
        return self._cluster.beside(namespace)

    async def close(self) -> None:
        await self._cluster.close()

    def _shown(self, there: Object, pod: Object | None) -> Object:
        """A claim as the pod that was asked for; `pod` is what it was given, and may not say so yet."""
        metadata, notes = there["metadata"], there["spec"]["additionalPodMetadata"]["annotations"]
        self._claims[notes[names.NONCE_NOTE]] = metadata["uid"]
        shown = None if pod is None else _as_asked(pod)
        if shown is not None and shown["metadata"]["uid"] == notes[names.NONCE_NOTE]:
            return shown
        why = {"type": "PodScheduled", "status": "False", "reason": "Claimed", "message": "the pool gave no pod yet"}
        for one in (there.get("status") or {}).get("conditions") or ():
            if one["type"] == "Ready" and one.get("status") == "False":
                why |= {"reason": str(one.get("reason")), "message": str(one.get("message"))}
        kept = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
        return {
            "metadata": {**kept, "uid": notes[names.NONCE_NOTE], "annotations": notes},
            "spec": {"containers": [{"name": CONTAINER}]},
            "status": {"phase": "Pending", "conditions": [why]},
        }

    def _noted(self, pod: Object) -> Object:
        shown = _as_asked(pod)
        if shown is not pod:
            self._real[shown["metadata"]["name"]] = pod["metadata"]["name"]
        return shown


def claim(manifest: Object, pool: str) -> Object:
    """A claim in place of a pod: the same name, owner and notes, and what its init needs to know."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    (container,) = spec["containers"]
    settings: Object = json.loads(container["command"][-1])
    (token,) = (one["value"] for one in container["env"] if one["name"] == settings["token_env"])
    notes = {
        **{name: value for name, value in metadata["annotations"].items() if name.startswith("openforgerl/")},
        POD_NOTE: metadata["name"],
        DIAL_NOTE: json.dumps(settings),
        TOKEN_NOTE: token,
    }
    until = datetime.now(UTC) + timedelta(seconds=spec["activeDeadlineSeconds"])
    return {
        "metadata": {name: metadata[name] for name in ("name", "labels", "ownerReferences")},
        "spec": {
            "warmPoolRef": {"name": pool},
            # What a pod's own deadline is for, which would count from its start: warm pods grow old.
            "lifecycle": {"shutdownTime": until.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"},
            "additionalPodMetadata": {
                "labels": {RUN_LABEL: metadata["labels"][names.RUN_LABEL]},
                "annotations": notes,
            },
        },
    }


def warm_pool(manifest: Object, init: bytes, name: str, replicas: int) -> list[Object]:
    """The objects of a pool whose pods are like `manifest`: ConfigMap with our init, template, pool."""
    digest = hashlib.sha256(init).hexdigest()[:12]
    bundle = manifests.run_map(name, init)
    bundle |= {"apiVersion": "v1", "kind": "ConfigMap"}
    bundle["metadata"] = {"name": f"{name}-init-{digest}", "labels": {names.APP_LABEL: names.APP}}
    spec: Object = {key: value for key, value in manifest["spec"].items() if key != "activeDeadlineSeconds"}
    (container,) = spec["containers"]
    mount = {"name": "claim", "mountPath": CLAIM_DIRECTORY, "readOnly": True}
    container = {key: value for key, value in container.items() if key != "env"} | {
        "command": [*container["command"][: container["command"].index("-c") + 1], _WAIT, CLAIM_DIRECTORY],
        "volumeMounts": [*container["volumeMounts"], mount],
    }
    items = [
        {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{note}']"}}
        for path, note in (("token", TOKEN_NOTE), ("dial", DIAL_NOTE))
    ]
    volumes = [
        {**volume, "configMap": {**volume["configMap"], "name": bundle["metadata"]["name"]}}
        if volume["name"] == "init"
        else volume
        for volume in spec["volumes"]
    ]
    spec |= {"containers": [container], "volumes": [*volumes, {"name": "claim", "downwardAPI": {"items": items}}]}
    labels = {key: manifest["metadata"]["labels"][key] for key in _SHARED_LABELS}
    template: Object = {
        "apiVersion": _GROUP,
        "kind": TEMPLATE.kind,
        "metadata": {"name": name, "annotations": {FITS_NOTE: fingerprint(manifest)}},
        "spec": {
            # Its own policy would open the internet; ours select these pods by their labels.
            "networkPolicyManagement": "Unmanaged",
            "service": False,
            "podTemplate": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    pool: Object = {
        "apiVersion": _GROUP,
        "kind": POOL.kind,
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "sandboxTemplateRef": {"name": name},
            "updateStrategy": {"type": "Recreate"},
        },
    }
    return [bundle, template, pool]


_SHARED_LABELS = (names.APP_LABEL, names.PART_LABEL, names.NETWORK_LABEL)
"""Of all pods of a pool. The last one keeps verifiers out of pools: theirs says "none"."""


def fingerprint(manifest: Object) -> str:
    """Digest of what a pod is made of, without what differs from attempt to attempt. Our own init counts."""
    spec: Object = {key: value for key, value in manifest["spec"].items() if key != "activeDeadlineSeconds"}
    spec["containers"] = [
        {key: value for key, value in one.items() if key not in ("command", "env")} for one in spec["containers"]
    ]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "init"]
    labels = {key: manifest["metadata"]["labels"].get(key) for key in _SHARED_LABELS}
    init = hashlib.sha256(manifests.init_bundle()).hexdigest()
    text = json.dumps([init, labels, spec], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ours(labels: str) -> str:
    """The same selector for pods: a claim cannot give its pod our own label of the run."""
    asked = dict(one.split("=", 1) for one in labels.split(",") if one)
    return selector({RUN_LABEL if name == names.RUN_LABEL else name: value for name, value in asked.items()})


def _given(there: Object) -> str:
    """Name of the pod that a claim was given; empty while it has none."""
    notes: Mapping[str, str] = there["metadata"].get("annotations") or {}
    status: Object = there.get("status") or {}
    return str((status.get("sandbox") or {}).get("name") or notes.get(_SANDBOX_NAME, ""))


def _as_asked(pod: Object) -> Object:
    """A pod under the name and nonce of its attempt; itself where nobody claimed it."""
    metadata = pod["metadata"]
    notes: Mapping[str, str] = metadata.get("annotations") or {}
    if POD_NOTE not in notes:
        return pod
    return {**pod, "metadata": {**metadata, "name": notes[POD_NOTE], "uid": notes[names.NONCE_NOTE]}}
