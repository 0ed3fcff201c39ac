"""Which image, files and variables a task's sandbox gets, by backend."""

from __future__ import annotations

from openforgerl.config import RoomsConfig
from openforgerl.sandboxes.images import base_reference, task_reference
from openforgerl.tasks import EnvironmentPlan, needs_image, plan_environment
from openforgerl.types import Task

WITH_IMAGES = ("container", "kubernetes")
"""Backends whose sandboxes start from an image; elsewhere the host's own system takes its place."""


def environment_of(task: Task, config: RoomsConfig) -> tuple[EnvironmentPlan, str]:
    """What goes in as files and variables, and the image; an empty image leaves the choice to the backend.

    Raises TaskError for an environment that the backend cannot give.
    """
    if config.backend not in WITH_IMAGES or not needs_image(task):
        return plan_environment(task), ""
    if task.environment.image is not None:
        image = task.environment.image
    else:
        container = config.sandbox.container
        base = (container.image or base_reference()) if container.replace_from else None
        image = task_reference(task, base)
    return EnvironmentPlan(workdir=task.environment.workdir, env=dict(task.environment.env), base=image), image
