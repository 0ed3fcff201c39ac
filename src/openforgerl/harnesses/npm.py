"""Fetching a locked npm package tree with the pinned Node's own npm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime

TIMEOUT = 900.0
"""Seconds for one npm run."""


def npm_ci(node: NodeRuntime, building: Path, npm_cache: Path) -> None:
    """Fill `building/node_modules` from the lock in `building`, checked by the lock's integrity hashes.

    Needs the network for what `npm_cache` does not hold. Raises `InputError` naming the command and its last words.
    """
    # --ignore-scripts: nothing we install needs its scripts, and none should run on the host.
    arguments = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--cache", str(npm_cache)]
    command = [node.binary, node.npm, *arguments]
    path = os.pathsep.join([str(Path(node.binary).parent), os.environ.get("PATH", os.defpath)])
    try:
        done = subprocess.run(
            command,
            cwd=building,
            env={**os.environ, "PATH": path, "npm_config_update_notifier": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            umask=0o022,  # readable for the sandbox's uid whatever the caller's umask
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"`npm {' '.join(arguments)}` did not end within {TIMEOUT:.0f} s; is the npm registry reachable?"
        ) from error
    if done.returncode != 0:
        tail = done.stdout[-1500:].decode(errors="replace").strip()
        raise InputError(
            f"`npm {' '.join(arguments)}` exited {done.returncode}; the npm registry must be reachable for the first "
            f"installation. Its last words:\n{tail}"
        )
