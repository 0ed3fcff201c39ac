"""`storm.py`, which also runs as a program of its own, as the module that `storm:Class` in a config finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

STORM = Path(__file__).with_name("storm.py")


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("storm", STORM)
    assert spec is not None and spec.loader is not None
    module = sys.modules["storm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


storm = _loaded()
