"""Start up to argv[1] sleeping children; say how many live, then wait for argv[2] seconds."""

import os
import sys
import time

most, seconds = int(sys.argv[1]), float(sys.argv[2])
made = 0
for _ in range(most):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        time.sleep(60)
        os._exit(0)
    made += 1
print(made, flush=True)
time.sleep(seconds)
