"""Gain a writable system: remount, mount, unmount, unshare. Prints what worked."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND, CLONE_NEWUSER, CLONE_NEWNS = 0x20, 0x1000, 0x10000000, 0x20000
worked = []
if os.fork() == 0:
    os._exit(0 if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 else 1)
if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
    worked.append("unshare")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    worked.append("mount")
if libc.mount(None, b"/", None, MS_REMOUNT | MS_BIND, None) == 0:
    worked.append("remount")
try:
    with open("/planted", "w") as file:
        file.write("x")
    worked.append("write")
except OSError:
    pass
if libc.umount2(b"/etc/ssl", 2) == 0:
    worked.append("umount")
print(" ".join(worked))
