"""What every test runs under."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import settings

# The same examples on every run, so that a change is judged by what it changed. `HYPOTHESIS_PROFILE=explore` looks for
# new ones; what it finds becomes an `@example` of the test that it broke.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of containers are skipped where no engine can be had, which in CI is an error of the set-up instead."""
    if os.environ.get("CI") or (os.geteuid() == 0 and (shutil.which("podman") or shutil.which("docker"))):
        return
    reason = "no container engine: scripts/container_engine.sh installs one, as root"
    for item in items:
        if item.get_closest_marker("container") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
