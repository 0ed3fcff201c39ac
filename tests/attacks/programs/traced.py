"""Ask to be traced by init, which is our parent, and stop: a stop is no end."""

import ctypes
import os
import signal
import sys

PTRACE_TRACEME = 0
if ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, None, None):
    sys.exit("not traced")
os.kill(os.getpid(), signal.SIGUSR1)
