"""The last step of OpenClaw's own installation, which it does itself when it is first started.

Its package comes marked as incomplete. Before anything else, the first start checks the package's files, then takes
the mark away: that must happen while the directory can still be written.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime

MARK = "node_modules/openclaw/.openclaw-lifecycle-pending"
TIMEOUT = 300.0
"""Seconds."""


def complete_openclaw(node: NodeRuntime, directory: Path) -> None:
    """Start OpenClaw once, only for its version. Raises `InputError` when the mark is still there afterwards."""
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                [node.binary, str(directory.absolute() / "node_modules" / "openclaw" / "openclaw.mjs"), "--version"],
                cwd=home,
                env={"PATH": f"{Path(node.binary).parent}{os.pathsep}{os.defpath}", "HOME": home, "TMPDIR": home},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                umask=0o022,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"OpenClaw did not complete its installation within {TIMEOUT:.0f} s") from error
    if done.returncode != 0 or (directory / MARK).exists():
        said = done.stdout[-1000:].decode(errors="replace").strip()
        raise InputError(f"OpenClaw did not complete its installation: exit {done.returncode}, it said {said!r}")
