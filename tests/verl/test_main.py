"""veRL's task runner opens the run folder and serves the proxy, so it stays on the machine that the command is on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]

PROGRAM = """
import ray
from ray.cluster_utils import Cluster
from openforgerl.training.verl.main import BesideDriver

# Two machines, of which the driver's is the fuller one: left alone, Ray would rather take the other.
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=8)
ray.init(address=cluster.address)

class Where:
    def __init__(self, say):
        self.say = say
    def node(self):
        return ray.get_runtime_context().get_node_id(), self.say

here = ray.get_runtime_context().get_node_id()
wrapped = BesideDriver(ray.remote(Where))
actors = [wrapped.remote("a"), wrapped.options(num_cpus=0).options(name="named").remote("b")]
assert [ray.get(actor.node.remote()) for actor in actors] == [(here, "a"), (here, "b")]
assert ray.get(ray.get_actor("named").node.remote()) == (here, "b")
taken = [ray.remote(Where).options(num_cpus=1).remote("free") for _ in range(4)]
assert any(ray.get(actor.node.remote())[0] != here for actor in taken), "the other machine is not used at all"
ray.shutdown()
cluster.shutdown()
print("beside")
"""


def test_the_task_runner_is_started_where_the_command_is() -> None:
    # A place of its own (and a short one: sockets lie in it), because whatever starts Ray later joins a cluster that
    # the common place names.
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"RAY_TMPDIR": place},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("beside\n")
