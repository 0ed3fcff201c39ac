"""A platform for veRL that is this machine's processor: every part of veRL's trainers runs, only slower.

Contract: veRL 0.9 `plugin/platform/platform_base.py`. The methods carry veRL's names; what needs an accelerator does
nothing here.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
import types
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform.platform_base import PlatformBase
from verl.utils import distributed

BACKEND = "cpu:gloo"


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that veRL calls whatever the device is."""

    def __init__(self) -> None:
        super().__init__("openforgerl_cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def ipc_collect(self) -> None:
        """Nothing is shared."""

    def max_memory_allocated(self, *_: Any) -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, *_: Any) -> None:
        """No peak is kept."""

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def set_device(self, *_: Any) -> None:
        """There is one."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1


class CpuPlatform(PlatformBase):
    """veRL's view of a machine without an accelerator. Ray's "GPU" is then a logical slot (`ray_init.num_gpus`)."""

    def __init__(self) -> None:
        self._module = _CpuModule()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by searching: every machine has a processor."""
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Work on the processor is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No allocator to set."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""


def use_one_backend() -> None:
    """veRL names the backends of cpu and of the device; here both are the same, which torch refuses to hear twice."""
    in_ray = distributed.initialize_global_process_group_ray

    def process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        in_ray(timeout_second=timeout_second, backend=backend or BACKEND)

    def process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
        local, rank, world = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        torch.distributed.init_process_group(
            backend=BACKEND,
            timeout=timedelta(seconds=timeout_second),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )
        return local, rank, max(world, 1)

    distributed.initialize_global_process_group_ray = process_group_ray
    distributed.initialize_global_process_group = process_group


def use_pageable_memory() -> None:
    """veRL keeps a reference model in pinned memory, for copies to a device; there is none, and torch cannot pin."""
    made = CPUOffloadPolicy.__init__

    def pageable(self: CPUOffloadPolicy, pin_memory: bool = False) -> None:
        del pin_memory
        made(self, pin_memory=False)

    CPUOffloadPolicy.__init__ = pageable
