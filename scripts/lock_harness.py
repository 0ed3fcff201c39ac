"""Write the lock of an npm harness: `scripts/lock_harness.py codex @openai/codex 0.171.0`.

The lock names no host (npm takes packages from the user's configured registry and checks them by integrity
hash), and only what a glibc Linux sandbox can use: other platforms' optional packages are left out, as are those
that the registry did not have when the lock was made (`npm ci` would refuse the lock for either).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from openforgerl.harnesses.node import find_node

INSTALL = (
    *("install", "--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund"),
    "--omit-lockfile-registry-resolved",
)
LOCKS = Path(__file__).parents[1] / "src" / "openforgerl" / "harnesses" / "locks"


def main(name: str, package: str, version: str) -> None:
    """Resolve `package` at `version` with npm and write `locks/<name>`."""
    project = f"openforgerl-harness-{name}"
    manifest = {"name": project, "private": True, "dependencies": {package: version}}
    node = find_node()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "package.json").write_text(json.dumps(manifest))
        subprocess.run(
            [node.binary, node.npm, *INSTALL],
            cwd=scratch,
            env={**os.environ, "PATH": f"{Path(node.binary).parent}{os.pathsep}{os.environ['PATH']}"},
            check=True,
        )
        lock = json.loads((Path(scratch) / "package-lock.json").read_text())
    entries: dict[str, Any] = lock["packages"]
    kept = {path: entry for path, entry in entries.items() if usable(path, entry)}
    names = {path.rpartition("node_modules/")[2] for path in kept}
    for entry in kept.values():
        optional = {each: wanted for each, wanted in entry.get("optionalDependencies", {}).items() if each in names}
        if "optionalDependencies" in entry:
            entry["optionalDependencies"] = optional
    directory = LOCKS / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "package.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (directory / "package-lock.json").write_text(json.dumps({**lock, "packages": kept}, indent=2) + "\n")
    print(f"{directory}: {len(kept) - 1} packages of {len(entries) - 1}")


def usable(path: str, entry: dict[str, Any]) -> bool:
    """Whether a package can be of use in a glibc Linux sandbox on x64 or arm64."""
    if not entry.get("optional"):
        return True
    if path.endswith("-baseline") or "musl" in path or "wasm" in path:
        return False
    systems, processors = entry.get("os", ["linux"]), entry.get("cpu", ["x64"])
    return "linux" in systems and bool({"x64", "arm64"} & set(processors))


if __name__ == "__main__":
    main(*sys.argv[1:4])
