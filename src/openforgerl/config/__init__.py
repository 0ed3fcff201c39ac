"""One config for people (TOML) and machines (JSON): the sum of what each room declares (DESIGN §4, §7)."""

from openforgerl.config.loading import load_config, resolved_json
from openforgerl.config.schema import RoomsConfig, TasksOptions
from openforgerl.config.selection import choose_tasks

__all__ = ["RoomsConfig", "TasksOptions", "choose_tasks", "load_config", "resolved_json"]
