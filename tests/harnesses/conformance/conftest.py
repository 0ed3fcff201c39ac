"""Slow rows run when they are asked for: with `-m slow`, or when a matrix is being written."""

from __future__ import annotations

import os

import pytest

from .matrix import VARIABLE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow rows out by name, so that pytest counts them as deselected."""
    if os.environ.get(VARIABLE) or "slow" in str(config.getoption("markexpr")):
        return
    here = os.path.dirname(__file__)
    left_out = [item for item in items if str(item.path).startswith(here) and item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
