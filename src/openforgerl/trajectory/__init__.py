"""From recorded calls to threads, trajectories and training samples. Pure."""

from openforgerl.trajectory.auditing import AttemptAudit, CallAccount, audit_attempt
from openforgerl.trajectory.batches import batch_totals, mask_stale
from openforgerl.trajectory.breaks import BROKEN, Break, PrefixWatch, count_breaks, find_breaks
from openforgerl.trajectory.differences import Cause, Difference, first_difference
from openforgerl.trajectory.marks import Mark, annotate
from openforgerl.trajectory.options import SamplePolicy
from openforgerl.trajectory.samples import account, build_samples, check_exact
from openforgerl.trajectory.threads import Attribution, attribute, with_thoughts
from openforgerl.trajectory.tree import build, carried, predecessors

__all__ = [
    "BROKEN",
    "AttemptAudit",
    "Attribution",
    "Break",
    "CallAccount",
    "Cause",
    "Difference",
    "Mark",
    "PrefixWatch",
    "SamplePolicy",
    "account",
    "annotate",
    "attribute",
    "audit_attempt",
    "batch_totals",
    "build",
    "build_samples",
    "carried",
    "check_exact",
    "count_breaks",
    "find_breaks",
    "first_difference",
    "mask_stale",
    "predecessors",
    "with_thoughts",
]
