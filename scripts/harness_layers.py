"""Lays installed harnesses out as they lie in a sandbox: `python scripts/harness_layers.py DESTINATION HARNESS...`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from openforgerl.harnesses import HarnessOptions
from openforgerl.orchestrator.assembly import open_harness


def main() -> None:
    """Copy each layer of the harnesses below the destination; one that two harnesses share (Node) once."""
    destination, *names = sys.argv[1:]
    layers = {
        layer.target: layer.source for name in names for layer in open_harness(HarnessOptions(name=name)).layers()
    }
    for target, source in sorted(layers.items()):
        print(f"{target}  from {source}")
        shutil.copytree(source, Path(destination) / target.lstrip("/"), symlinks=True)


if __name__ == "__main__":
    main()
