"""What a pod's object says about its attempt. Pure: one function over one dictionary.

The order is that of evidence: `pod.reason` (what the node or the control plane did) before a container's termination
reason (the kernel's and the runtime's word; OOMKilled also with exit code 0 and phase Succeeded), before its exit code,
before what a pod waits for. A container's state is acted on without waiting for the phase, which lags by a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from openforgerl.sandboxes.kubernetes.cluster import Object, conditions
from openforgerl.types import Failure, Origin, Stage

CONTAINER = "rollout"
"""Name of the container that holds our init."""

Patience = Literal["schedule", "pull", "start"]
"""Which of the deadlines runs while a pod waits."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Not running yet. `kind` is what it is called when `patience` is at its end."""

    patience: Patience
    kind: str
    message: str


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """The container runs, as far as its node has said."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """It ran when its node was last heard of. Phase Running stays for ever; only Ready=False tells."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """It will never run (again)."""

    failure: Failure


Reading = Waiting | Running | Lost | Ended

_POD_REASONS: dict[str, tuple[str, Origin, bool]] = {
    # reason → kind, origin, retryable
    "DeadlineExceeded": ("deadline", Origin.INFRASTRUCTURE, True),
    "Evicted": ("evicted", Origin.INFRASTRUCTURE, True),
    "NodeLost": ("node_lost", Origin.INFRASTRUCTURE, True),
    "NodeShutdown": ("node_lost", Origin.INFRASTRUCTURE, True),
    "Shutdown": ("node_lost", Origin.INFRASTRUCTURE, True),
    "Terminated": ("node_lost", Origin.INFRASTRUCTURE, True),
    "Preempting": ("preempted", Origin.INFRASTRUCTURE, True),
    "Preempted": ("preempted", Origin.INFRASTRUCTURE, True),
    "NodeAffinity": ("refused_by_node", Origin.INFRASTRUCTURE, True),
    "UnexpectedAdmissionError": ("refused_by_node", Origin.INFRASTRUCTURE, True),
}
_REFUSED_BY_NODE = ("OutOf", "Node", "Taint", "Pod")
"""Beginnings of further reasons with which a kubelet refuses a pod (OutOfcpu, NodeName, TaintToleration)."""

_OWN_LIMIT = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""What an eviction's message says when the pod itself wrote too much; else its node was in need."""

_TERMINATED = {
    "OOMKilled": "oom",
    "StartError": "start_error",
    "ContainerCannotRun": "start_error",
    "ContainerStatusUnknown": "node_lost",
}
"""Termination reason → kind. All may go better on another node, and refills are bounded."""
_CODES = {128: "start_error", 137: "killed", 143: "terminated"}

_HOPELESS = {
    # reason → kind, retryable (another node may have the image)
    "ErrImageNeverPull": ("image_absent", True),
    "InvalidImageName": ("image_name", False),
    "CreateContainerConfigError": ("pod_config", False),
    "CreateContainerError": ("start_error", True),
    "RunContainerError": ("start_error", True),
}
"""Waiting reasons that no waiting changes."""
_PULLING = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed")


def read(pod: Object) -> Reading:
    """What the pod's status says. A pod whose deletion has begun is read like any other."""
    status: Object = pod.get("status", {})
    reason, phase = str(status.get("reason") or ""), str(status.get("phase") or "Pending")
    if (ended := _by_reason(reason, str(status.get("message") or ""), phase)) is not None:
        return Ended(failure=ended)
    own = _state_of(status.get("containerStatuses"), CONTAINER)
    copies = [_state_of(status.get("initContainerStatuses"), name) for name in _names(status, "initContainerStatuses")]
    if "terminated" in own:
        return Ended(failure=_terminated(own["terminated"], "the sandbox's init"))
    for copy in copies:
        if "terminated" in copy and (
            copy["terminated"].get("exitCode") or copy["terminated"].get("reason") != "Completed"
        ):
            return Ended(failure=_terminated(copy["terminated"], "an init container that brings a layer"))
    if phase in ("Failed", "Succeeded") and pod["metadata"].get("deletionTimestamp"):
        return Ended(failure=deleted(pod))
    if phase in ("Failed", "Succeeded"):
        text = f"the pod is {phase} ({reason or 'no reason given'}): {status.get('message') or 'no message'}"
        return Ended(failure=_failure("ended", text))
    for state in (*copies, own):
        if "waiting" in state and (waiting := _waiting(state["waiting"])) is not None:
            return waiting
    if "running" in own:
        # Without a probe Ready follows the container. Only the control plane, in place of a node that it does not hear,
        # says that a pod is not ready whose container is.
        ready = conditions(pod).get("Ready", {}).get("status")
        contradicted = ready in ("False", "Unknown") and _is_ready(status)
        return Lost() if contradicted or phase == "Unknown" else Running()
    return _pending(pod)


def deleted(pod: Object | None) -> Failure:
    """Somebody else deleted the pod."""
    said = "" if pod is None else f"; it was {pod.get('status', {}).get('phase', 'Pending')}"
    return _failure("deleted", f"the pod was deleted, and not by us{said}")


def abandoned(pod: Object, kind: str, evidence: Mapping[str, object]) -> str:
    """Why a pod was given up before another process came to adopt it; empty when it broke by itself.

    `pod` as that process found it; `kind` and `evidence` of how it ended. Init ends with 0 only when it is told that
    nobody wants it any more, or has told itself so.
    """
    if pod["metadata"].get("deletionTimestamp"):
        return "it was being deleted already"
    return (
        "its init was sent away, or waited in vain" if (kind, evidence.get("exit_code")) == ("init_ended", "0") else ""
    )


def lost(seconds: float) -> Failure:
    """Its node has been out of reach for too long."""
    return _failure("node_lost", f"the pod's node was out of reach for {seconds:.0f} s")


def overdue(waiting: Waiting, seconds: float) -> Failure:
    """A deadline has passed while the pod waited."""
    return _failure(waiting.kind, f"after {seconds:.0f} s the pod still waits: {waiting.message}")


def _by_reason(reason: str, message: str, phase: str) -> Failure | None:
    if phase != "Failed" and reason not in ("NodeLost", "DeadlineExceeded", "Evicted"):
        return None
    text = f"{reason}: {message}" if message else reason
    if reason == "Evicted" and any(words in message for words in _OWN_LIMIT):
        return _failure("disk_limit", text, origin=Origin.BUDGET)
    if reason in _POD_REASONS:
        kind, origin, retryable = _POD_REASONS[reason]
        return _failure(kind, text, origin=origin, retryable=retryable)
    return _failure("refused_by_node", text) if reason.startswith(_REFUSED_BY_NODE) else None


def _terminated(state: Object, what: str) -> Failure:
    reason, code = str(state.get("reason") or ""), int(state.get("exitCode") or 0)
    tail = str(state.get("message") or "").strip()
    said = f"{what} ended: {reason or 'no reason'}, exit code {code}"
    evidence = {"reason": reason, "exit_code": str(code)} | ({"tail": tail[-2000:]} if tail else {})
    kind = _TERMINATED.get(reason) or _CODES.get(code, "init_ended")
    return _failure(kind, f"{said}{'; ' + tail[-500:] if tail else ''}", evidence=evidence)


def _waiting(state: Object) -> Reading | None:
    """None for a container that is just not started yet (ContainerCreating, PodInitializing)."""
    reason = str(state.get("reason") or "")
    text = f"{reason}: {state.get('message') or 'no message'}"
    if reason in _HOPELESS:
        kind, retryable = _HOPELESS[reason]
        return Ended(failure=_failure(kind, text, retryable=retryable))
    if reason in _PULLING:
        return Waiting(patience="pull", kind="image_pull", message=text)
    return None


def _pending(pod: Object) -> Waiting:
    scheduled = conditions(pod).get("PodScheduled", {})
    if scheduled.get("status") == "True" or pod.get("spec", {}).get("nodeName"):
        return Waiting(
            patience="start", kind="start_timeout", message="it has a node, and its container is not running"
        )
    reason = str(scheduled.get("reason") or "no reason yet")
    return Waiting(
        patience="schedule",
        kind="unschedulable",
        message=f"{reason}: {scheduled.get('message') or 'no node has been chosen'}",
    )


def _names(status: Object, key: str) -> list[str]:
    found: Sequence[Object] = status.get(key) or ()
    return [str(item["name"]) for item in found]


def _is_ready(status: Object) -> bool:
    found: Sequence[Object] = status.get("containerStatuses") or ()
    return any(item.get("name") == CONTAINER and item.get("ready") for item in found)


def _state_of(statuses: Sequence[Object] | None, name: str) -> Object:
    for item in statuses or ():
        if item.get("name") == name:
            state: Object = item.get("state") or {}
            return state
    return {}


def _failure(
    kind: str,
    message: str,
    *,
    origin: Origin = Origin.INFRASTRUCTURE,
    retryable: bool = True,
    evidence: dict[str, str] | None = None,
) -> Failure:
    return Failure(
        stage=Stage.SANDBOX,
        kind=kind,
        origin=origin,
        message=message[:2000],
        retryable=retryable,
        evidence=evidence or {},
    )
