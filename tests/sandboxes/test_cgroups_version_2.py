"""Limits by control groups of version 2 alone, on a kernel of its own: User Mode Linux, with this machine's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BOOT = """#!/bin/sh
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={source}
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run
mkdir -p /dev/pts /dev/shm; mount -t devpts pts /dev/pts; mount -t tmpfs shm /dev/shm; chmod 1777 /dev/shm
mkdir -m 1777 /run/tmp; export TMPDIR=/run/tmp; for number in 0 1 2; do mkdir -m 1777 /run/state-$number; done
mount -t cgroup2 cgroups /sys/fs/cgroup; cd /sys/fs/cgroup
{probing}-0
mkdir -p user/app; echo +memory +pids > user/cgroup.subtree_control; chown -R 1000:1000 user
sh -c 'echo $$ > user/app/cgroup.procs; exec setpriv --reuid=1000 --regid=1000 --clear-groups -- {probing}-1'
mkdir leaf; chown -R 1001:1001 leaf
sh -c 'echo $$ > leaf/cgroup.procs; exec setpriv --reuid=1001 --regid=1001 --clear-groups -- {probing}-2'
echo o > /proc/sysrq-trigger; sleep 10
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_version_2_bounds_a_sandbox(tmp_path: Path) -> None:
    """As root where nobody has switched a controller on; as a user with a delegated group; as one without."""
    linux = shutil.which("linux.uml", path=f"{os.environ['PATH']}:{os.environ.get('OPENFORGERL_UML', '')}")
    assert linux is not None, "apt-get install user-mode-linux, or name the folder of linux.uml in OPENFORGERL_UML"
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    probe = HERE / "inside_version_2.py"
    probing = f"{sys.executable} {probe} /run/state"
    (boot := tmp_path / "boot.sh").write_text(BOOT.format(source=HERE.parents[1] / "src", probing=probing))
    boot.chmod(0o755)
    words = [linux, "mem=2G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "con=null"]
    words += ["con0=fd:0,fd:1", "cgroup_no_v1=all", f"init={boot}"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=800, check=False)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    said: dict[str, dict[str, Any]] = {user: json.loads(text) for _, user, text in lines}
    assert list(said) == ["0", "1000", "1001"], done.stdout[-3000:]
    top = "/sys/fs/cgroup"
    for user, place in (("0", top), ("1000", f"{top}/user")):
        assert said[user]["place"] == place
        assert said[user]["memory"] == "cgroup v2 48 MB, tmpfs included"
        assert said[user]["processes"] == "RLIMIT_NPROC 24, cgroup v2 24"
        assert [said[user][how] for how in ("heap", "memfd", "shared")] == ["oom"] * 3
    assert said["1001"]["place"] is None
    assert said["1001"]["memory"].startswith("RLIMIT_DATA 48 MB per process, watchdog 48 MB")
    assert [said["1001"][how] for how in ("heap", "memfd", "shared")] == ["refused", "refused", "oom"]
    for user in said:
        assert (said[user]["forks"], said[user]["after"], said[user]["left"]) == (23, 0, [])
