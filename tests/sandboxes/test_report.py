"""What a sandbox says of itself, checked from inside and outside."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.sandbox


async def test_the_report_names_every_namespace_of_its_own(backend, spec):
    async with backend.create(spec, "a") as sandbox:
        named = dict(sandbox.report["namespaces"])
        said = await sandbox.exec(
            ["stat", "-Lc", "%i", *(f"/proc/self/ns/{name}" for name in named)], env={}, timeout=5
        )
        assert {"user", "pid", "net", "ipc", "uts", "mnt"} <= named.keys()
        assert [int(word) for word in said.stdout.split()] == list(named.values())
        assert all(os.stat(f"/proc/self/ns/{name}").st_ino != inode for name, inode in named.items())
