"""What the objects of a run are called, and the labels by which they are found. Pure."""

from __future__ import annotations

import hashlib
import re

APP_LABEL, APP = "app.kubernetes.io/name", "openforgerl"
PART_LABEL = "app.kubernetes.io/component"
ROLLOUT_PART, RUN_PART = "rollout", "run"
RUN_LABEL = "openforgerl/run"
ROLLOUT_LABEL = "openforgerl/rollout"
NUMBER_LABEL = "openforgerl/attempt"
NETWORK_LABEL = "openforgerl/network"
"""`proxy`: the agent may reach the model; `none`: nothing but our gateway. NetworkPolicies select by it."""
RUN_NOTE, ATTEMPT_NOTE = "openforgerl/run-id", "openforgerl/attempt-id"
NONCE_NOTE = "openforgerl/nonce"
"""Annotation drawn for each pod: says whose a name is that is taken already, and goes into the pod's credential."""
HOME_NOTE = "openforgerl/home"
"""Annotation of a Lease: machine and folder of the run whose process holds it (`host/digest`)."""

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ATTEMPT = re.compile(r"(?P<rollout>.+)-a(?P<number>\d+)(?P<verify>-verify)?")


def label_value(text: str) -> str:
    """`text` where it is a valid label value, else what can be kept of it and a digest of the whole."""
    if _LABEL.fullmatch(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9]+", "-", text)[:40].strip("-") or "x"
    return f"{kept}-{_digest(text, 8)}"


def run_object(run_id: str) -> str:
    """Name of the ConfigMap that owns everything of a run, and of its Lease."""
    return f"ofrl-run-{_digest(run_id, 10)}"


def init_object(run_id: str, bundle: bytes) -> str:
    """Name of a ConfigMap that brings this very bundle of our init."""
    return f"{run_object(run_id)}-{hashlib.sha256(bundle).hexdigest()[:10]}"


def pod_name(run_id: str, attempt_id: str) -> str:
    """The same for the same attempt, so that a request repeated after a lost answer makes no second pod."""
    parts = _ATTEMPT.fullmatch(attempt_id)
    head = f"ofrl-{_digest(run_id, 8)}"
    if parts is None:
        return f"{head}-{_digest(attempt_id, 16)}"
    end = "-verify" if parts["verify"] else ""
    return f"{head}-{_digest(parts['rollout'], 12)}-a{parts['number'][:12]}{end}"


def is_verifier(attempt_id: str) -> bool:
    """Whether a sandbox of this id grades what another left."""
    parts = _ATTEMPT.fullmatch(attempt_id)
    return parts is not None and parts["verify"] is not None


def run_labels(run_id: str) -> dict[str, str]:
    """What every object of the run carries."""
    return {APP_LABEL: APP, RUN_LABEL: label_value(run_id)}


def pod_labels(run_id: str, attempt_id: str, *, network: bool) -> dict[str, str]:
    """A pod's labels: run, rollout, attempt number, and what it may reach."""
    parts = _ATTEMPT.fullmatch(attempt_id)
    return run_labels(run_id) | {
        PART_LABEL: ROLLOUT_PART,
        ROLLOUT_LABEL: label_value(parts["rollout"] if parts else attempt_id),
        NUMBER_LABEL: label_value(f"{parts['number']}{parts['verify'] or ''}" if parts else "1"),
        NETWORK_LABEL: "proxy" if network else "none",
    }


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
