"""A Kubernetes API server with scheduler, kubelet and controllers, in one process, for tests.

What it shows was compared with a real 1.36 cluster: which field says what, in which order, after how long. Pods are
real processes (bubblewrap) or coroutines, in this machine's network or, as root, in one of their own in which
NetworkPolicies are enforced. Not played: restarts of containers, probes, Services, and the controllers of Deployments
and DaemonSets.
"""

from openforgerl.testing.fake_kubernetes.clock import Clock, Timings
from openforgerl.testing.fake_kubernetes.cluster import ClusterOptions, FakeCluster
from openforgerl.testing.fake_kubernetes.containers import Image, ProgramContext
from openforgerl.testing.fake_kubernetes.faults import Faults
from openforgerl.testing.fake_kubernetes.nodes import NodeSpec
from openforgerl.testing.fake_kubernetes.scenarios import FAULTS, SCENARIOS, Planted, Scenario, Shown

__all__ = [
    "FAULTS",
    "SCENARIOS",
    "Clock",
    "ClusterOptions",
    "FakeCluster",
    "Faults",
    "Image",
    "NodeSpec",
    "Planted",
    "ProgramContext",
    "Scenario",
    "Shown",
    "Timings",
]
