"""What a spec means, whichever backend carries it out: who the agent is, which directories it may write."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from openforgerl.errors import InputError
from openforgerl.sandboxes.guards import Guards
from openforgerl.types import JsonValue, SandboxSpec

AGENT_UID = 1000
"""Uid and gid of everything inside."""
AGENT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOSTNAME = "sandbox"
INIT_HOME = "/.openforgerl"
"""Where our init's own files are inside."""
SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

_FIXED_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"agent:x:{AGENT_UID}:{AGENT_UID}:agent:{{home}}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": f"root:x:0:\nagent:x:{AGENT_UID}:\nnogroup:x:65534:\n",
    # no ::1, where the endpoint does not listen
    "/etc/hosts": f"127.0.0.1\tlocalhost {HOSTNAME}\n",
    "/etc/hostname": f"{HOSTNAME}\n",
    "/etc/resolv.conf": "",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_RESERVED = ("/usr", "/etc", "/proc", "/dev", "/sys", INIT_HOME, "/host")
_INODES_PER_MB = 1024
_WATCH_SECONDS = (0.2, 1.0)
"""Between two looks of init's watchdog: when it bounds memory, and when only inodes."""


def check_spec(spec: SandboxSpec) -> None:
    """Refuse paths that would cover the system or each other. Raises InputError naming the field."""
    for field, path in _paths(spec):
        pure = PurePosixPath(path)
        clean = str(pure) == path and pure.is_absolute() and ".." not in pure.parts and path != "/"
        system = [*_RESERVED, *("/" + name for name in SYSTEM_DIRECTORIES)]
        if not clean or any(path == top or path.startswith(top + "/") for top in system):
            raise InputError(f"sandbox {field}: {path!r} must be a plain absolute path outside {', '.join(system)}")
    for layer in spec.layers:
        source = Path(layer.source)
        if not source.is_absolute() or not source.is_dir():
            raise InputError(f"sandbox layer: {layer.source} is not an absolute path of a directory")
    writable = writable_directories(spec)
    for target, source in spec.files.items():
        if not any(target.startswith(top + "/") or target == top for top in writable):
            raise InputError(f"sandbox files: {target} is in no writable directory ({', '.join(writable)})")
        if not Path(source).exists():
            raise InputError(f"sandbox files: {source} does not exist")
    if not 1024 <= spec.endpoint_port <= 65535:
        raise InputError(f"sandbox endpoint_port: {spec.endpoint_port} must be between 1024 and 65535")


def _paths(spec: SandboxSpec) -> Iterator[tuple[str, str]]:
    yield "workdir", spec.workdir
    yield "home", spec.home
    yield from (("scratch", path) for path in spec.scratch)
    yield from (("layer target", layer.target) for layer in spec.layers)
    yield from (("files", path) for path in spec.files)


def writable_directories(spec: SandboxSpec) -> list[str]:
    """Every tmpfs the agent may write, outer before inner."""
    return sorted({"/tmp", spec.home, spec.workdir, *spec.scratch}, key=lambda path: (path.count("/"), path))


def fixed_files(spec: SandboxSpec) -> dict[str, bytes]:
    """Path inside → content of the synthetic files of /etc."""
    return {path: text.replace("{home}", spec.home).encode() for path, text in _FIXED_FILES.items()}


def init_settings(
    spec: SandboxSpec, guards: Guards, *, watched: bool, counted: bool = False, call_filter: bytes = b""
) -> dict[str, JsonValue]:
    """What `start` tells init.

    `watched`: no cgroup bounds memory, so rlimits and init's watchdog must. `counted`: one bounds the processes, and
    the host's uid is shared with other sandboxes, so that RLIMIT_NPROC, which counts per uid, must not.
    `call_filter` (`seccomp.program`): for init to put on every program, where nobody has put it on init.
    """
    limits = spec.limits
    rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": limits.open_files}
    if guards.process_limit and not counted:
        rlimits["RLIMIT_NPROC"] = limits.processes + 1  # init counts
    if limits.cpu_seconds is not None:
        rlimits["RLIMIT_CPU"] = limits.cpu_seconds
    if watched:
        rlimits["RLIMIT_DATA"] = limits.memory_mb << 20
    return {
        "rlimits": dict(rlimits),
        "plain_files": guards.plain_files,
        "writable": [*writable_directories(spec), "/dev/shm"],
        "most_inodes": limits.disk_mb * _INODES_PER_MB if guards.disk_limit else 0,
        "most_memory": limits.memory_mb << 20 if watched else None,
        "tick": _WATCH_SECONDS[0 if watched else 1],
        "filter": base64.b64encode(call_filter).decode(),
    }
