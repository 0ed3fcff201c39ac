"""Entry point `verl.plugins`: what every process of veRL learns of us when it imports verl.

* rollout `openforgerl_torch`: the torch engine as a replica of veRL's, for CPUs and small models;
* platform `cpu`, chosen by `VERL_PLATFORM=cpu` only, so that veRL's trainers run without an accelerator.

Registration is all that happens here, and it is cheap: the replica's modules are imported when they are used.
Contracts: veRL 0.9 `plugin/platform/platform_manager.py`, `workers/rollout/{base,replica}.py`.
"""

# verl is installed in another environment than the type checker's.
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from openforgerl.training.verl.cpu import CpuPlatform, use_one_backend, use_pageable_memory

ROLLOUT = "openforgerl_torch"
"""`actor_rollout_ref.rollout.name` of the replica that needs no vLLM and no GPU."""
_REPLICA = "openforgerl.training.verl.replica"


def _load_replica() -> Any:
    # Imported late: this module is imported while `verl` itself is, and the replica needs torch and transformers.
    return import_module(_REPLICA).TorchReplica


PlatformRegistry.register(platform="cpu")(CpuPlatform)
RolloutReplicaRegistry.register(ROLLOUT, _load_replica)
base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{_REPLICA}.ServerAdapter"  # veRL has no function for it
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    use_one_backend()
    use_pageable_memory()
    # veRL's FSDP engine is registered for cuda and npu; nothing in it needs them.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    os.environ.setdefault("VERL_ENGINE_VENDOR", "nvidia")
