"""Fill standard output and error from argv[1] processes at once, reopened and enlarged; with `leave`, go first."""

import contextlib
import fcntl
import os
import sys
import time

F_SETPIPE_SZ = 1031
for _ in range(int(sys.argv[1])):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        pipes = [os.open(f"/proc/self/fd/{number}", os.O_WRONLY) for number in (1, 2)]
        for pipe in pipes:
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, F_SETPIPE_SZ, 1 << 20)
        while True:
            for pipe in pipes:
                os.write(pipe, bytes(65536))
if sys.argv[2:] == ["leave"]:
    os._exit(7)
time.sleep(60)
