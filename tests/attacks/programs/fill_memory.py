"""Take argv[2] megabytes as argv[1] says (heap, children, memfd, shared) and say `reached` when it worked."""

import mmap
import os
import sys
import time

how, megabytes = sys.argv[1], int(sys.argv[2])
held = []
if how == "heap":
    for _ in range(megabytes // 8):
        held.append(b"x" * (8 << 20))
elif how == "children":
    for _ in range(8):
        if os.fork() == 0:
            held.append(b"x" * (megabytes // 8 << 20))
            time.sleep(20)
            os._exit(0)
    time.sleep(2)
    if any(os.waitpid(-1, os.WNOHANG)[0] for _ in range(8)):
        sys.exit("a child is gone")
elif how == "memfd":
    held.append(os.memfd_create("filler"))
    for _ in range(megabytes):
        os.write(held[0], b"x" * (1 << 20))
elif how == "shared":
    held.append(mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
    for offset in range(0, megabytes << 20, 4096):
        held[0][offset] = 1
    time.sleep(1)
print("reached", flush=True)
