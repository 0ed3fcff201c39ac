"""What every test runs under."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples on every run, so that a change is judged by what it changed. `HYPOTHESIS_PROFILE=explore` looks for
# new ones; what it finds becomes an `@example` of the test that it broke.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
