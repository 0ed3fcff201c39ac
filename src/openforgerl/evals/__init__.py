"""From attempts' verdicts to numbers with intervals. Pure: no torch, no I/O."""

from openforgerl.evals.metrics import (
    Interval,
    bootstrap_mean,
    paired_difference,
    paired_difference_over_runs,
    pass_at_k,
    pass_hat_k,
    pass_hat_k_power,
)
from openforgerl.evals.summary import (
    StageDifference,
    StageSummary,
    TaskResult,
    compare_stages,
    summarise,
    summarise_by,
)

__all__ = [
    "Interval",
    "StageDifference",
    "StageSummary",
    "TaskResult",
    "bootstrap_mean",
    "compare_stages",
    "paired_difference",
    "paired_difference_over_runs",
    "pass_at_k",
    "pass_hat_k",
    "pass_hat_k_power",
    "summarise",
    "summarise_by",
]
