"""Opening the engine that a command line or a config names, without importing the others' libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from openforgerl.engines.options import EngineOptions
from openforgerl.errors import ConfigError
from openforgerl.plugins import load
from openforgerl.protocols import Engine, Renderer


def engine_options(spec: str, options: EngineOptions | None = None) -> EngineOptions:
    """`KIND:PATH` (`scripted:answers.json`, `torch:models/tiny`) put into `options`. Raises ConfigError."""
    kind, colon, path = spec.partition(":")
    if not colon or not kind or not path:
        raise ConfigError(
            f"an engine is given as KIND:PATH, like torch:DIR, vllm:URL or relay:openai:URL; got {spec!r}"
        )
    return msgspec.structs.replace(options or EngineOptions(), kind=kind, path=path)


def open_engine(spec: str | None, renderer: Renderer, options: EngineOptions | None = None) -> Engine:
    """The engine that `spec` (`KIND:PATH`) names, else the one that `options` name.

    An engine class has `open(path, renderer, options)`; one that opens no file reads `options.path`, because a URL
    is no path. Raises ConfigError for an unknown kind or a missing
    library, InputError when the path holds nothing it can open.
    """
    chosen = (options or EngineOptions()) if spec is None else engine_options(spec, options)
    if not chosen.path:
        raise ConfigError(
            "engine.path is empty: give a model directory (torch), a script file (scripted) or openai:URL (relay)"
        )
    kind: Any = load("engine", chosen.kind)
    engine: Engine = kind.open(Path(chosen.path), renderer, chosen)
    return engine
