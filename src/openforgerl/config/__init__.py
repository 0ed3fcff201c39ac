"""One config for people (TOML) and machines (JSON): the sum of what each room declares (DESIGN §4, §7)."""

from openforgerl.config.loading import load_config, resolved_json
from openforgerl.config.schema import RoomsConfig, TasksOptions

__all__ = ["RoomsConfig", "TasksOptions", "load_config", "resolved_json"]
