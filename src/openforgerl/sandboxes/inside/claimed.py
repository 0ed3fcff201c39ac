"""PID 1 of a warm pod: waits until the pod is claimed, then is init, which dials where the claim says.

`argv[1]`: the directory in which the downward API shows `dial` (init's settings) and `token`, empty until then.
"""

from __future__ import annotations

import json
import os
import sys
import time

from . import init

_PAUSE = 0.1


def main() -> None:
    """Runs until the sandbox ends."""
    folder = sys.argv[1]
    while not all(told := [_read(folder, name) for name in ("dial", "token")]):
        time.sleep(_PAUSE)
    os.environ[json.loads(told[0])["token_env"]] = told[1]  # init takes it from there, out of everybody's sight
    sys.argv[1:] = ["dial", told[0]]
    init.main()


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read()
