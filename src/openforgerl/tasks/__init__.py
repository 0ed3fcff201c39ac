"""Tasks on disk: Harbor task directories and what a sandbox needs from them."""

from openforgerl.tasks.environment import EnvironmentPlan, needs_image, plan_environment
from openforgerl.tasks.harbor import lint, read_task, read_tasks, task_directories
from openforgerl.tasks.section import Finding

__all__ = [
    "EnvironmentPlan",
    "Finding",
    "lint",
    "needs_image",
    "plan_environment",
    "read_task",
    "read_tasks",
    "task_directories",
]
