"""What veRL's processes read of a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from openforgerl.errors import ConfigError
from openforgerl.orchestrator.assembly import CONFIG_FILE
from openforgerl.training.configs import GrpoConfig

CHECKPOINTS = "checkpoints/verl"
"""veRL's own checkpoints, in the run folder."""
METRICS = "verl_metrics.jsonl"
"""What veRL's file logger writes, in the run folder: a line `{"step", "data"}` per step of the latest start."""


def read_config(folder: Path) -> GrpoConfig:
    """The config that `train grpo` kept in the run folder. ConfigError when there is none."""
    file = folder / CONFIG_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=GrpoConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is no config of `openforgerl train grpo`: {error}") from error
