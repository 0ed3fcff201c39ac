"""Every row of what a real API server showed, and what it means for an attempt."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from openforgerl.sandboxes.kubernetes.classification import Ended, Lost, Running, Waiting, deleted, lost, overdue, read
from openforgerl.types import Origin, Stage

_spec = importlib.util.spec_from_file_location("pods", Path(__file__).with_name("pods.py"))
assert _spec is not None and _spec.loader is not None
pods = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pods)
pod, terminated, waiting = pods.pod, pods.terminated, pods.waiting

SCHEDULED = {"PodScheduled": "True", "Ready": "False", "ContainersReady": "False"}
RUNNING = {"running": {"startedAt": "2026-11-30T00:00:00Z"}}
INFRA, BUDGET = Origin.INFRASTRUCTURE, Origin.BUDGET

ENDS: list[tuple[str, Any, str, Origin, bool]] = [
    # what happened, pod, kind, origin, retryable
    (
        "exit 0, container ahead of the phase",
        pod("Running", state=terminated("Completed", 0)),
        "init_ended",
        INFRA,
        True,
    ),
    ("exit 3", pod("Failed", state=terminated("Error", 3)), "init_ended", INFRA, True),
    ("OOM of PID 1", pod("Failed", state=terminated("OOMKilled", 137)), "oom", INFRA, True),
    ("OOM of a child, cgroup v1", pod("Succeeded", state=terminated("OOMKilled", 0)), "oom", INFRA, True),
    (
        "deadline",
        pod(
            "Failed",
            reason="DeadlineExceeded",
            message="Pod was active on the node longer",
            state=terminated("Error", 137),
        ),
        "deadline",
        INFRA,
        True,
    ),
    (
        "deadline while the container still runs (kubernetes#88613)",
        pod("Failed", reason="DeadlineExceeded", state=RUNNING),
        "deadline",
        INFRA,
        True,
    ),
    (
        "evicted for its own writing",
        pod(
            "Failed",
            reason="Evicted",
            message="Pod ephemeral local storage usage exceeds the total limit of containers 8Mi. ",
            state=terminated("Error", 137),
        ),
        "disk_limit",
        BUDGET,
        True,
    ),
    (
        "evicted because an emptyDir is full",
        pod("Failed", reason="Evicted", message='Usage of EmptyDir volume "writable-0" exceeds the limit "64Mi". '),
        "disk_limit",
        BUDGET,
        True,
    ),
    (
        "evicted because the node was in need",
        pod("Failed", reason="Evicted", message="The node was low on resource: memory. Threshold quantity: 100Mi"),
        "evicted",
        INFRA,
        True,
    ),
    ("node shut down", pod("Failed", reason="Terminated", message="imminent node shutdown"), "node_lost", INFRA, True),
    (
        "preempted",
        pod("Failed", reason="Preempting", message="Preempted to admit critical pod"),
        "preempted",
        INFRA,
        True,
    ),
    (
        "refused for CPU",
        pod("Failed", reason="OutOfcpu", message="Node didn't have enough"),
        "refused_by_node",
        INFRA,
        True,
    ),
    ("admission", pod("Failed", reason="UnexpectedAdmissionError", message="x"), "refused_by_node", INFRA, True),
    ("bad command", pod("Failed", state=terminated("StartError", 128, "exec: not found")), "start_error", INFRA, True),
    ("old runtimes' word", pod("Failed", state=terminated("ContainerCannotRun", 127)), "start_error", INFRA, True),
    ("killed, and not for memory", pod("Failed", state=terminated("Error", 137)), "killed", INFRA, True),
    ("TERM from outside", pod("Failed", state=terminated("Error", 143)), "terminated", INFRA, True),
    ("node gone and back", pod("Failed", state=terminated("ContainerStatusUnknown", 137)), "node_lost", INFRA, True),
    ("pull policy Never", pod("Pending", state=waiting("ErrImageNeverPull")), "image_absent", INFRA, True),
    ("image name", pod("Pending", state=waiting("InvalidImageName")), "image_name", INFRA, False),
    ("missing ConfigMap key", pod("Pending", state=waiting("CreateContainerConfigError")), "pod_config", INFRA, False),
    ("a layer cannot be copied", pod("Pending", init=terminated("Error", 1, "cp: no such")), "init_ended", INFRA, True),
    ("failed without a word", pod("Failed"), "ended", INFRA, True),
]


@pytest.mark.parametrize(
    ("given", "kind", "origin", "retryable"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_an_end_is_classified(given: Any, kind: str, origin: Origin, retryable: bool) -> None:
    reading = read(given)
    assert isinstance(reading, Ended)
    failure = reading.failure
    assert (failure.stage, failure.kind, failure.origin, failure.retryable) == (Stage.SANDBOX, kind, origin, retryable)
    assert failure.message


def test_the_last_words_of_a_container_are_evidence() -> None:
    reading = read(pod("Failed", state=terminated("Error", 1, "ModuleNotFoundError: inside")))
    assert isinstance(reading, Ended)
    assert reading.failure.evidence["tail"] == "ModuleNotFoundError: inside"
    assert reading.failure.evidence["exit_code"] == "1"


UNSCHEDULABLE = {"PodScheduled": ("False", "Unschedulable", "0/1 nodes are available: 1 Insufficient memory.")}


@pytest.mark.parametrize(
    ("given", "patience", "kind"),
    [
        (pod("Pending"), "schedule", "unschedulable"),
        (pod("Pending", conditions=UNSCHEDULABLE), "schedule", "unschedulable"),
        (pod("Pending", conditions=SCHEDULED), "start", "start_timeout"),
        (pod("Pending", conditions=SCHEDULED, state=waiting("ContainerCreating")), "start", "start_timeout"),
        (pod("Pending", conditions=SCHEDULED, state=waiting("ErrImagePull")), "pull", "image_pull"),
        (pod("Pending", conditions=SCHEDULED, state=waiting("ImagePullBackOff")), "pull", "image_pull"),
        (
            pod("Pending", conditions=SCHEDULED, state=waiting("PodInitializing"), init=waiting("ImagePullBackOff")),
            "pull",
            "image_pull",
        ),
        (
            pod("Pending", conditions=SCHEDULED, state=waiting("PodInitializing"), init=terminated("Completed", 0)),
            "start",
            "start_timeout",
        ),
    ],
)
def test_a_pod_that_may_still_come_is_waited_for(given: Any, patience: str, kind: str) -> None:
    reading = read(given)
    assert isinstance(reading, Waiting)
    assert (reading.patience, reading.kind) == (patience, kind)
    assert overdue(reading, 600).kind == kind


def test_running_and_lost() -> None:
    started = pod("Running", conditions=SCHEDULED, state=RUNNING, ready=False)
    runs = pod(
        "Running", conditions=SCHEDULED | {"Ready": "True", "ContainersReady": "True"}, state=RUNNING, ready=True
    )
    # The node controller writes this 40 s after a kubelet's last word; phase and container stay as they were.
    gone = pod(
        "Running", conditions=SCHEDULED | {"Ready": "False", "ContainersReady": "True"}, state=RUNNING, ready=True
    )
    assert isinstance(read(started), Running)
    assert isinstance(read(runs), Running)
    assert isinstance(read(gone), Lost)
    assert lost(31).kind == "node_lost" and lost(31).retryable


def test_a_deletion_by_others_is_infrastructure() -> None:
    half = pod("Failed")
    half["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    reading = read(half)
    assert isinstance(reading, Ended) and reading.failure.kind == "deleted"
    failure = deleted(pod("Running"))
    assert (failure.kind, failure.origin, failure.retryable) == ("deleted", Origin.INFRASTRUCTURE, True)
