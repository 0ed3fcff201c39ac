"""What this machine can do, for `openforgerl doctor`."""

from __future__ import annotations

import os
import subprocess

import msgspec

from openforgerl.errors import InputError
from openforgerl.sandboxes import cgroups, seccomp
from openforgerl.sandboxes.bubblewrap import find_bwrap, system_python
from openforgerl.sandboxes.options import SandboxOptions


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `fix` is empty when `ok`; a check that is not `required` only weakens a limit."""

    check: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True


def probe(options: SandboxOptions) -> list[Check]:
    """Try what a sandbox needs. Starts one short program; takes some 30 ms."""
    return [_bubblewrap(options), _python(), _filter(), *_limits(options)]


def _bubblewrap(options: SandboxOptions) -> Check:
    try:
        path = find_bwrap(options.bwrap)
    except InputError as error:
        return Check(check="bubblewrap", ok=False, detail="not found", fix=str(error))
    words = [str(path), "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    words += ["--ro-bind", "/", "/", "--", "/bin/true"]
    try:
        ended = subprocess.run(words, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(check="bubblewrap", ok=False, detail=f"{path}: {error}", fix="reinstall bubblewrap")
    if ended.returncode != 0:
        return Check(
            check="bubblewrap",
            ok=False,
            detail=f"{path}: {ended.stderr.decode(errors='replace').strip()[-300:]}",
            fix="allow user namespaces: sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 "
            "and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns=0; in a container, its seccomp profile",
        )
    return Check(check="bubblewrap", ok=True, detail=f"{path}, own user, pid, net, ipc, uts and mount namespaces")


def _python() -> Check:
    try:
        return Check(check="python inside", ok=True, detail=str(system_python()))
    except InputError as error:
        return Check(check="python inside", ok=False, detail="not found", fix=str(error))


def _filter() -> Check:
    machine = os.uname().machine
    if seccomp.supported(machine):
        return Check(check="system-call filter", ok=True, detail=f"for {machine}")
    return Check(
        check="system-call filter",
        ok=False,
        detail=f"none for {machine}: vsock and changes to our init's limits stay possible",
        fix="run on x86_64 or aarch64",
        required=False,
    )


def _limits(options: SandboxOptions) -> list[Check]:
    found = None if options.cgroups == "off" else cgroups.detect()
    memory = found is not None and found.memory is not None
    pids = found is not None and found.processes is not None
    version = found.version if found is not None else 0
    return [
        Check(
            check="memory limit",
            ok=memory,
            detail=f"cgroup v{version}" if memory else "RLIMIT_DATA per process and a watchdog",
            fix="" if memory else "run as root, or give this user a delegated cgroup with memory and pids",
            required=options.cgroups == "require",
        ),
        Check(
            check="process limit",
            ok=True,
            detail=f"RLIMIT_NPROC and cgroup v{version}" if pids else "RLIMIT_NPROC in an own user namespace",
        ),
    ]
