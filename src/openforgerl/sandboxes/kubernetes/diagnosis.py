"""What a cluster lacks for rollouts, for `openforgerl doctor --kubernetes`."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import msgspec

from openforgerl.errors import ConfigError, InputError, OpenForgeError
from openforgerl.sandboxes.kubernetes import manifests, names
from openforgerl.sandboxes.kubernetes.access import find_access
from openforgerl.sandboxes.kubernetes.backend import KubernetesSandboxes
from openforgerl.sandboxes.kubernetes.claims import CLAIM, CLAIM_VERBS, ClaimingCluster
from openforgerl.sandboxes.kubernetes.cluster import (
    CONFIG_MAP,
    LEASE,
    NETWORK_POLICY,
    POD,
    QUOTA,
    Cluster,
    ClusterError,
    Kind,
    Object,
)
from openforgerl.sandboxes.kubernetes.http import HttpCluster
from openforgerl.sandboxes.kubernetes.manifests import Boarding
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check
from openforgerl.types import SandboxSpec

RIGHTS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    (POD, "", ("create", "get", "list", "watch", "delete", "deletecollection")),
    (POD, "log", ("get",)),
    (CONFIG_MAP, "", ("create", "get", "delete")),
    (LEASE, "", ("create", "get", "list", "patch", "delete")),
)
"""Everything that a run asks the API server for; `deploy/kubernetes/base/rbac.yaml` grants exactly this."""

_MANIFESTS = "deploy/kubernetes/base (a further namespace's are in more)"
_RUN = "doctor"
_OWNER = {"metadata": {"name": "doctor", "uid": "00000000-0000-0000-0000-000000000000"}}


async def examine(options: SandboxOptions) -> AsyncGenerator[Check]:
    """One finding after another; the last starts a sandbox. Ends early where nothing further can be found out."""
    chosen = options.kubernetes
    try:
        access = find_access(chosen.kubeconfig, chosen.context, os.environ)
    except InputError as error:
        yield Check(check="cluster access", ok=False, detail="none", fix=str(error))
        return
    yield Check(check="cluster access", ok=True, detail=f"{access.source}: {access.server}")
    cluster = HttpCluster(access, chosen.namespace, tries=2)
    try:
        async with contextlib.aclosing(_asked(cluster, options)) as checks:
            async for check in checks:
                yield check
    finally:
        await cluster.close()


async def _asked(first: Cluster, options: SandboxOptions) -> AsyncGenerator[Check]:
    try:
        yield Check(check="API server", ok=True, detail=f"Kubernetes {await first.version()}")
    except (ClusterError, InputError) as error:
        yield _unreachable(error)
        return
    whole = True
    for cluster in (first, *map(first.beside, options.kubernetes.more_namespaces)):
        async with contextlib.aclosing(_namespace(cluster, options)) as checks:
            async for check in checks:
                whole = whole and (check.ok or not check.required)
                yield check
    if options.kubernetes.warm_pool:
        check = await _warm_pool(first, options.kubernetes.warm_pool)
        whole = whole and check.ok
        yield check
    if whole:
        yield await _sandbox(options)


async def _namespace(cluster: Cluster, options: SandboxOptions) -> AsyncGenerator[Check]:
    """What one namespace gives and lacks; its name is said where there are several."""
    where = f" in {cluster.namespace}" if options.kubernetes.more_namespaces else ""
    try:
        missing = [check async for check in _rights(cluster)]
    except (ClusterError, InputError) as error:
        yield _unreachable(error)
        return
    for check in missing:
        yield check
    if not missing:
        yield Check(check="rights", ok=True, detail=f"all that a run needs in namespace {cluster.namespace}")
    for check in (await _pod(cluster, options), await _quota(cluster), await _policies(cluster)):
        yield msgspec.structs.replace(check, detail=check.detail + where)


def _unreachable(error: Exception) -> Check:
    fix = "see that this machine reaches it and that the kubeconfig's credentials are good (`kubectl version`)"
    return Check(check="API server", ok=False, detail=str(error), fix=fix)


async def _rights(cluster: Cluster) -> AsyncGenerator[Check]:
    """One finding for each missing right."""
    for kind, subresource, verbs in RIGHTS:
        lacking = [verb for verb in verbs if not await cluster.may(verb, kind, subresource=subresource)]
        if lacking:
            what = f"{kind.plural}{'/' + subresource if subresource else ''}"
            yield Check(
                check=f"right on {what}",
                ok=False,
                detail=f"may not {', '.join(lacking)} in namespace {cluster.namespace}",
                fix=f"apply rbac.yaml of {_MANIFESTS}, or have these verbs granted",
            )


async def _pod(cluster: Cluster, options: SandboxOptions) -> Check:
    """Ask for a pod and take none: namespace, pod security, quota and webhooks all have their say."""
    chosen, spec = options.kubernetes, SandboxSpec(run_id=_RUN)
    try:
        manifests.check(spec, chosen)
        boarding = Boarding(attempt_id="doctor-a0", nonce="0", arguments=(), env={}, init_map="doctor")
        await cluster.create(POD, manifests.pod(spec, chosen, boarding, _OWNER), dry_run=True)
    except InputError as error:
        return Check(check="sandbox pod", ok=False, detail="cannot be described", fix=str(error))
    except ClusterError as error:
        fix = "the message names who refuses: a missing namespace, a quota, pod security or a webhook"
        if error.over_quota:
            fix = "a run would wait for room; raise the quota, or lower limits.memory_mb and cpu_request"
        return Check(check="sandbox pod", ok=False, detail=str(error), fix=fix)
    return Check(check="sandbox pod", ok=True, detail=f"would be made, image {chosen.image}")


async def _warm_pool(cluster: Cluster, name: str) -> Check:
    """Whether the pool is there, leaves the network to our policies, and may be claimed from."""
    try:
        await ClaimingCluster(cluster, name).fitting()
        lacking = [verb for verb in CLAIM_VERBS if not await cluster.may(verb, CLAIM)]
    except (ConfigError, ClusterError) as error:
        return Check(check="warm pool", ok=False, detail=name, fix=str(error))
    if lacking:
        fix = "apply deploy/kubernetes/warm-pool, or have these verbs granted"
        return Check(check="warm pool", ok=False, detail=f"may not {', '.join(lacking)} {CLAIM.plural}", fix=fix)
    return Check(check="warm pool", ok=True, detail=f"{name} can be claimed from")


async def _quota(cluster: Cluster) -> Check:
    try:
        quotas = (await cluster.list(QUOTA)).items
    except ClusterError:
        return Check(check="quota", ok=True, detail="cannot be seen with these rights", required=False)
    said = [_filled(quota) for quota in quotas]
    return Check(check="quota", ok=True, detail="; ".join(said) or "none", required=False)


def _filled(quota: Object) -> str:
    status: Mapping[str, Mapping[str, str]] = quota.get("status", {})
    used, hard = status.get("used", {}), status.get("hard", {})
    return f"{quota['metadata']['name']}: " + ", ".join(f"{name} {used.get(name, '0')}/{hard[name]}" for name in hard)


async def _policies(cluster: Cluster) -> Check:
    """Whether some policy denies what rollouts send. Whether anybody enforces it, no API says."""
    try:
        policies = (await cluster.list(NETWORK_POLICY)).items
    except ClusterError:
        return Check(
            check="network policy",
            ok=False,
            detail="cannot be seen with these rights",
            fix=f"see that network.yaml of {_MANIFESTS} is applied",
            required=False,
        )
    labels = names.pod_labels(_RUN, "doctor-a0", network=True)
    found = [policy["metadata"]["name"] for policy in policies if _covers(policy, labels)]
    if not found:
        fix = f"apply network.yaml of {_MANIFESTS}; without it an agent reaches whatever the pod network does"
        detail = "none covers the rollouts' egress"
        return Check(check="network policy", ok=False, detail=detail, fix=fix, required=False)
    return Check(check="network policy", ok=True, detail=f"{', '.join(found)} (if the network plugin enforces it)")


def _covers(policy: Object, labels: Mapping[str, str]) -> bool:
    spec: Object = policy["spec"]
    wanted: Mapping[str, str] = (spec.get("podSelector") or {}).get("matchLabels") or {}
    return "Egress" in (spec.get("policyTypes") or ()) and all(labels.get(key) == wanted[key] for key in wanted)


async def _sandbox(options: SandboxOptions) -> Check:
    """Start one, and have it dial us: images, nodes and the way back to this machine."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="openforgerl-doctor-") as folder:
        try:
            async with KubernetesSandboxes(options, Path(folder)) as sandboxes:
                spec = SandboxSpec(run_id=f"{_RUN}-{os.getpid()}")
                async with sandboxes.create(spec, "doctor-a0") as sandbox:
                    node = sandbox.report["node"]
                    exit = await sandbox.exec(["/bin/sh", "-c", "true"], env={}, timeout=30)
        except (OpenForgeError, OSError) as error:
            fix = "the message says how far it came; `kubectl get events` in the namespace says more"
            return Check(check="a sandbox", ok=False, detail=str(error), fix=fix)
    seconds = time.monotonic() - begun
    if exit.code != 0:
        return Check(check="a sandbox", ok=False, detail=f"/bin/sh exits {exit.code}", fix="use an image with /bin/sh")
    return Check(check="a sandbox", ok=True, detail=f"started on {node}, reached us and was removed in {seconds:.1f} s")
