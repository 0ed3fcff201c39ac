"""`python -m openforgerl.training.verl.resolving SCHEMA KEY=VALUE ...`: veRL's config, resolved and checked by veRL.

Prints YAML. Exits with 2, and prints the reason instead, when Hydra knows no such key or veRL refuses a value.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config


def resolve(schema: str, overrides: Sequence[str]) -> Any:
    """The config of `schema` (a file of veRL's `trainer/config`). Raises what Hydra or veRL raise."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(schema, overrides=list(overrides))
    if schema == "ppo_trainer":
        validate_config(config, need_reference_policy(config), need_critic(config))
        for section in ("rollout", "actor"):
            omega_conf_to_dataclass(config.actor_rollout_ref[section])
        omega_conf_to_dataclass(config.algorithm)
    else:
        for section in ("optim", "engine"):
            omega_conf_to_dataclass(config[section])
    OmegaConf.resolve(config)
    return config


def main() -> None:
    """Resolve what the command line names."""
    schema, *overrides = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # veRL has things to say while it checks
            config = resolve(schema, overrides)
    except Exception as error:  # noqa: BLE001 (whatever veRL finds wrong is the answer)
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
    sys.stdout.write(OmegaConf.to_yaml(config))


if __name__ == "__main__":
    main()
