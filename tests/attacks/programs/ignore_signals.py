"""Ignore every signal that can be ignored and stay for a minute."""

import signal
import time

for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
