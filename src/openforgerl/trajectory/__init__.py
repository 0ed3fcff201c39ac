"""From recorded calls to threads, trajectories and training samples. Pure."""

from openforgerl.trajectory.marks import Mark, annotate
from openforgerl.trajectory.options import SamplePolicy
from openforgerl.trajectory.samples import account, build_samples, check_exact
from openforgerl.trajectory.threads import Attribution, attribute
from openforgerl.trajectory.tree import build, carried, predecessors

__all__ = [
    "Attribution",
    "Mark",
    "SamplePolicy",
    "account",
    "annotate",
    "attribute",
    "build",
    "build_samples",
    "carried",
    "check_exact",
    "predecessors",
]
