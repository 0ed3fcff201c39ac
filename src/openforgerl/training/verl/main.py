"""`python -m openforgerl.training.verl.main KEY=VALUE ...`: veRL's own `main_ppo`, with a task runner that checks.

veRL lets a recipe bring its task runner; ours is veRL's, whose trainer compares served and trained weights after each
step and closes our rooms at the end. It runs on this machine, whichever Ray would have chosen: it opens the run folder,
whose database is for one machine's processes, and pods find the proxy where this command was started. Everything else
is `verl.trainer.main_ppo.main`, Hydra included.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
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


class BesideDriver:
    """Stands for an actor class in `main_ppo`, which starts it when Ray is there: on the node that asks."""

    def __init__(self, actor_class: Any, **options: Any) -> None:
        self._actor_class = actor_class
        self._options = options

    def options(self, **options: Any) -> BesideDriver:
        """As an actor class's: the same with further options."""
        return BesideDriver(self._actor_class, **self._options, **options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the actor; its handle."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self._actor_class.options(scheduling_strategy=here, **self._options).remote(*args, **kwargs)


def main() -> None:
    """Run veRL's entry point."""
    main_ppo.TaskRunnerV1 = BesideDriver(ray.remote(TaskRunner))
    main_ppo.main()


if __name__ == "__main__":
    main()
