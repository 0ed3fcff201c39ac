"""Make namespaces by every call that can: unshare, clone, clone3. Prints what worked."""

import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
CLONE, CLONE3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[os.uname().machine]
SIGCHLD = 17
KINDS = {
    "user": 0x10000000,
    "mnt": 0x20000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x8000000,
    "uts": 0x4000000,
    "cgroup": 0x2000000,
    "time": 0x80,
}


def unshare(flags):
    child = os.fork()
    if child == 0:
        os._exit(libc.unshare(flags) and 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def clone(flags):
    if flags & 0xFF:  # where clone has the signal
        return False
    return ended(libc.syscall(CLONE, flags | SIGCHLD, 0, 0, 0, 0))


def clone3(flags):
    asked = ctypes.create_string_buffer(struct.pack("<11Q", flags, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0))
    return ended(libc.syscall(CLONE3, asked, 88))


def ended(child):
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
    return child > 0


for call in (unshare, clone, clone3):
    for name, flag in KINDS.items():
        if call(flag) or (name != "user" and call(flag | KINDS["user"])):
            print(f"{call.__name__}:{name}", end=" ")
