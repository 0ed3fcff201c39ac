"""Nodes: where pods fit, and what the control plane sees of a node whose kubelet is dead."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openforgerl.testing.fake_kubernetes import admission
from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.collecting import Spawn
from openforgerl.testing.fake_kubernetes.kinds import NODES, PODS, Object
from openforgerl.testing.fake_kubernetes.objects import Stored
from openforgerl.testing.fake_kubernetes.registry import DeleteOptions, Registry

READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
LOST = {
    "type": "Ready",
    "status": "Unknown",
    "reason": "NodeStatusUnknown",
    "message": "Kubelet stopped posting node status.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node that is to be."""

    name: str
    cpu: str = "64"
    memory: str = "256Gi"
    storage: str = "1Ti"
    pods: int = 1000
    labels: dict[str, str] = field(default_factory=dict[str, str])
    taken_by: str = ""
    """Uid of the only pod that may go there (a node that will be lost)."""

    @property
    def all_labels(self) -> dict[str, str]:
        """Its own and those that every node has."""
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        known = {"kubernetes.io/hostname": self.name, "kubernetes.io/arch": machine, "kubernetes.io/os": "linux"}
        return {**known, **self.labels}


@dataclass(slots=True)
class Node:
    """A node and what is on it."""

    spec: NodeSpec
    lost: bool = False
    back: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a lost node's kubelet is there again."""
    requests: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Pod uid → what it asked for. It counts until its containers are dead."""

    def lacks(self, pod: Object) -> str:
        """Why a pod does not fit; empty when it does."""
        spec = self.spec
        if len(self.requests) >= spec.pods:
            return "Too many pods"
        for name, capacity in (("cpu", spec.cpu), ("memory", spec.memory), ("ephemeral-storage", spec.storage)):
            taken = sum(one.get(name, 0.0) for one in self.requests.values())
            if taken + admission.asked(pod, "requests", name) > admission.quantity(capacity):
                return f"Insufficient {name}"
        wanted = pod["spec"].get("nodeSelector") or {}
        labels = spec.all_labels
        if any(labels.get(key) != value for key, value in wanted.items()):
            return "node(s) didn't match Pod's node affinity/selector"
        return ""


class Nodes:
    """All nodes, the scheduler's choice, and the node controller."""

    def __init__(self, registry: Registry, clock: Clock, timings: Timings, spawn: Spawn) -> None:
        self._registry = registry
        self._clock = clock
        self._timings = timings
        self._spawn = spawn
        self.nodes: dict[str, Node] = {}
        self.room = asyncio.Event()
        """Set (and replaced) when something that did not fit may fit now."""

    def add(self, spec: NodeSpec) -> Node:
        """A new node, ready at once."""
        node = self.nodes[spec.name] = Node(spec)
        capacity = {
            "cpu": spec.cpu,
            "memory": spec.memory,
            "ephemeral-storage": spec.storage,
            "pods": str(spec.pods),
        }
        body: Object = {
            "metadata": {"name": spec.name, "labels": spec.all_labels},
            "spec": {},
            "status": {
                "capacity": capacity,
                "allocatable": capacity,
                "conditions": [self._stamped(READY)],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "nodeInfo": _info(spec),
            },
        }
        self._registry.create(NODES, "", body)
        self._shout()
        return node

    def _stamped(self, condition: dict[str, str]) -> dict[str, str]:
        now = self._clock.now()
        return {**condition, "lastHeartbeatTime": now, "lastTransitionTime": now}

    def _shout(self) -> None:
        self.room.set()
        self.room = asyncio.Event()

    def choose(self, pod: Object) -> Node | str:
        """The emptiest node that has room, its place taken; or the scheduler's complaint."""
        uid = pod["metadata"]["uid"]
        ready = [node for node in self.nodes.values() if not node.lost and node.spec.taken_by in ("", uid)]
        ready.sort(key=lambda node: (node.spec.taken_by != uid, len(node.requests)))
        reasons: list[str] = []
        for node in ready:
            reason = node.lacks(pod)
            if not reason:
                names = ("cpu", "memory", "ephemeral-storage")
                node.requests[uid] = {name: admission.asked(pod, "requests", name) for name in names}
                return node
            reasons.append(reason)
        return complaint(len(self.nodes), reasons)

    def release(self, uid: str) -> None:
        """The pod's containers are dead: its place is free."""
        for node in self.nodes.values():
            if node.requests.pop(uid, None) is not None:
                self._shout()

    def lose(self, name: str) -> None:
        """Stop the node's kubelet: what runs there goes on, and nobody hears of it."""
        node = self.nodes[name]
        if not node.lost:
            node.lost = True
            node.back.clear()
            self._spawn(self._notice_loss(node))

    def restore(self, name: str) -> None:
        """The kubelet is back: it kills what should not be there, and reports again."""
        node = self.nodes[name]
        if not node.lost:
            return
        node.lost = False
        node.back.set()
        stored = self._registry.objects.get(NODES, ("", name))
        self._registry.objects.put(NODES, {**stored.body, "spec": {}})
        self._set_ready(name, READY)
        self._shout()

    def _set_ready(self, name: str, condition: dict[str, str]) -> None:
        stored = self._registry.objects.get(NODES, ("", name))
        status = {**stored.body["status"], "conditions": [self._stamped(condition)]}
        self._registry.set_status(NODES, ("", name), stored.uid, status)

    def _pods_on(self, node: Node) -> Sequence[Stored]:
        pods = self._registry.objects.list(PODS)
        return [pod for pod in pods if pod.body["spec"].get("nodeName") == node.spec.name]

    async def _notice_loss(self, node: Node) -> None:
        await self._clock.sleep(self._timings.lost_pods)
        if not node.lost:
            return
        for pod in self._pods_on(node):
            if not admission.finished(pod.body):
                self._unready(pod)
        await self._clock.sleep(self._timings.lost_node - self._timings.lost_pods)
        if not node.lost:
            return
        taint = {"key": admission.UNREACHABLE, "timeAdded": self._clock.now()}
        taints = [{**taint, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        stored = self._registry.objects.get(NODES, ("", node.spec.name))
        self._registry.objects.put(NODES, {**stored.body, "spec": {**stored.body["spec"], "taints": taints}})
        self._set_ready(node.spec.name, LOST)
        for pod in self._pods_on(node):
            self._registry.record(pod, "NodeNotReady", "Node is not ready", warning=True, source="node-controller")
            self._spawn(self._evict(node, pod))

    def _unready(self, pod: Stored) -> None:
        """What the node controller writes: Ready=False and nothing else, the phase stays."""
        status: dict[str, Any] = pod.body["status"]
        conditions = [
            {**one, "status": "False", "lastTransitionTime": self._clock.now()} if one["type"] == "Ready" else one
            for one in status.get("conditions") or []
        ]
        self._registry.set_status(PODS, pod.key, pod.uid, {**status, "conditions": conditions})

    async def _evict(self, node: Node, pod: Stored) -> None:
        """Delete the pod when it has tolerated the taint for as long as it says."""
        seconds = _tolerated(pod.body)
        if seconds is None:
            return
        await self._clock.sleep_promised(seconds)
        found = self._registry.objects.find(PODS, pod.key)
        if not node.lost or found is None or found.uid != pod.uid or admission.finished(found.body):
            return
        target = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
            "lastTransitionTime": self._clock.now(),
        }
        status = found.body["status"]
        conditions = [*(status.get("conditions") or []), target]
        self._registry.set_status(PODS, pod.key, pod.uid, {**status, "conditions": conditions})
        self._registry.delete(PODS, pod.key, DeleteOptions(preconditions={"uid": pod.uid}))


def _info(spec: NodeSpec) -> dict[str, str]:
    """What clients with typed models insist on."""
    told = {
        "architecture": spec.all_labels["kubernetes.io/arch"],
        "operatingSystem": "linux",
        "kubeletVersion": "v1.36.2",
        "kubeProxyVersion": "v1.36.2",
        "containerRuntimeVersion": "fake://1",
        "kernelVersion": platform.release(),
        "osImage": "fake",
    }
    return {**told, **dict.fromkeys(("bootID", "machineID", "systemUUID"), spec.name)}


def _tolerated(pod: Object) -> float | None:
    """Seconds that a pod stays on an unreachable node; None: for ever."""
    found = [
        toleration.get("tolerationSeconds")
        for toleration in pod["spec"].get("tolerations") or []
        if toleration.get("key") in (None, "", admission.UNREACHABLE)
        and toleration.get("effect") in (None, "", "NoExecute")
    ]
    if not found:
        return 0.0
    return None if None in found else float(min(seconds for seconds in found if seconds is not None))


def complaint(nodes: int, reasons: Sequence[str]) -> str:
    """The scheduler's message."""
    counted = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    listed = ", ".join(f"{count} {reason}" for reason, count in counted.items())
    missing = nodes - len(reasons)
    if missing:
        untolerated = f"{missing} node(s) had untolerated taint(s)"
        listed = f"{listed}, {untolerated}" if listed else untolerated
    tail = "preemption: No preemption victims found for incoming pod."
    return f"0/{nodes} nodes are available: {listed}. {tail}"
