"""Run many attempts: queue, concurrency, refill, retry, reconcile, resume (DESIGN §4)."""

from openforgerl.orchestrator.groups import OrchestratedGroups
from openforgerl.orchestrator.options import RunOptions
from openforgerl.orchestrator.planning import plan_rollouts, task_slug
from openforgerl.orchestrator.runs import GroupResult, Orchestrator, Recording, failure_line

__all__ = [
    "GroupResult",
    "OrchestratedGroups",
    "Orchestrator",
    "Recording",
    "RunOptions",
    "failure_line",
    "plan_rollouts",
    "task_slug",
]
