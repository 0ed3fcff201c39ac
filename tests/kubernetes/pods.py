"""Pod objects as a Kubernetes 1.36 API server showed them, cut to the fields that tell."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def pod(
    phase: str,
    *,
    reason: str = "",
    message: str = "",
    state: Object | None = None,
    conditions: Object | None = None,
    init: Object | None = None,
    ready: bool = False,
) -> Object:
    """One pod; `conditions` maps type to status, or to (status, reason, message)."""
    status: Object = {"phase": phase}
    status |= {"reason": reason} if reason else {}
    status |= {"message": message} if message else {}
    if state is not None:
        status["containerStatuses"] = [{"name": "rollout", "ready": ready, "state": state}]
    if init is not None:
        status["initContainerStatuses"] = [{"name": "layer-0", "ready": False, "state": init}]
    status["conditions"] = [
        {"type": kind, "status": given}
        if isinstance(given, str)
        else {"type": kind, "status": given[0], "reason": given[1], "message": given[2]}
        for kind, given in (conditions or {}).items()
    ]
    return {"metadata": {"name": "p", "uid": "u", "annotations": {}}, "spec": {"containers": []}, "status": status}


def terminated(reason: str, code: int, message: str = "") -> Object:
    """A container's end."""
    return {"terminated": {"reason": reason, "exitCode": code} | ({"message": message} if message else {})}


def waiting(reason: str, message: str = "") -> Object:
    """A container that does not run yet."""
    return {"waiting": {"reason": reason, "message": message}}
