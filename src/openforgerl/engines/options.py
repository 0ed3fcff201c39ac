"""What a user may set about the engine (config section `engine`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine answers, and what it may use."""

    kind: str = "torch"
    """A registry name (`torch`, `scripted`) or `module:Class`."""
    path: str = ""
    """What the engine opens: a model directory (torch) or a script file (scripted)."""
    model_name: str = ""
    """The name that `/v1/models` lists; empty = the engine's own choice (the directory's name, `scripted`)."""
    context_length: int | None = None
    """Most tokens of prompt and answer together; at most the model's own. None = the model's."""
    threads: int | None = 1
    """CPU threads of the engine. Models of a few million parameters gain nothing from a second one; None = torch's
    own setting (all cores)."""
    max_sequences: int = 64
    """Answers sampled at once; further requests wait."""
    max_batch_tokens: int = 512
    """Most tokens computed in one step. Smaller = a long prompt delays the others less; larger = it is done sooner."""
    max_waiting: int = 4096
    """Requests that may wait before further ones are refused with 429."""
    kv_memory_mb: int = 1024
    """Memory for cached keys and values in MiB. Sequences being sampled may outgrow it (then nothing else is kept)."""
    device: str = "cpu"
    """torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and keys. On CPUs without bfloat16 instructions float32 is several times faster."""

    def __post_init__(self) -> None:
        for name in ("context_length", "threads", "max_sequences", "max_batch_tokens", "max_waiting", "kv_memory_mb"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
