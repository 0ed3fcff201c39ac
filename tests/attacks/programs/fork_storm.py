"""Every process forks for ever in new sessions and ignores what can be ignored; bounded by the process limit."""

import os
import signal
import time

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
first = os.getpid()
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.getpid() % 3 == 0 and os.getpid() != first:
            os._exit(0)  # make room, so that there is always a birth under way
