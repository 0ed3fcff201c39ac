"""Which tasks a config means."""

from __future__ import annotations

from pathlib import Path

from openforgerl.config.schema import RoomsConfig
from openforgerl.errors import ConfigError
from openforgerl.tasks import read_tasks
from openforgerl.types import Task


def choose_tasks(config: RoomsConfig) -> list[Task]:
    """The tasks that `[tasks]` selects, in name order; ConfigError when none is left."""
    if not config.tasks.path:
        raise ConfigError("which tasks? name a task directory, or a directory of them: TASKS or [tasks] path")
    found = read_tasks(Path(config.tasks.path))
    if config.tasks.split is not None:
        found = [task for task in found if task.metadata.get("split") == config.tasks.split]
    found = found[: config.tasks.limit]
    if not found:
        raise ConfigError(f"no task is left in {config.tasks.path} (tasks.split = {config.tasks.split!r})")
    return found
