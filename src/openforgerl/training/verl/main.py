"""`python -m openforgerl.training.verl.main KEY=VALUE ...`: veRL's own `main_ppo`, with a task runner that checks.

veRL lets a recipe bring its task runner; ours is veRL's, whose trainer compares served and trained weights after each
step and closes our rooms at the end. Everything else is `verl.trainer.main_ppo.main`, Hydra included.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

import ray
from verl.trainer import main_ppo

from openforgerl.training.verl.checking import use_checked_trainer


class TaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
    """veRL's v1 task runner around a checked trainer."""

    def run(self, config: Any) -> None:
        """Train; the rooms of our agent loops are closed however it ends."""
        use_checked_trainer(config.trainer.v1.trainer_mode)
        try:
            super().run(config)
        finally:
            close = getattr(self.agent_loop_manager, "close", None)
            if close is not None:
                close()


def main() -> None:
    """Run veRL's entry point."""
    main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    main()
