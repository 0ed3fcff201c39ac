"""Double-fork into an own session, let the parent end, and keep writing argv[1] for a minute."""

import os
import signal
import sys
import time

if os.fork():
    time.sleep(0.2)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end, count = time.monotonic() + 60, 0
while time.monotonic() < end:
    count += 1
    with open(sys.argv[1], "w") as file:
        file.write(str(count))
    time.sleep(0.02)
