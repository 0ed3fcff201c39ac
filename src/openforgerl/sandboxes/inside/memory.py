"""Want of memory: whom the kernel kills first, and what it killed, by the cgroup that we are in, where we see it."""

from __future__ import annotations

import os

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Version 2 and 1, as an engine mounts them into a container. A process sandbox has neither."""

PROGRAMS_SCORE = 900
"""Of every program, so that where no cgroup counts us, init goes last."""


class OomScore:
    """Init's own `oom_score_adj`, opened while init is dumpable: later it is root's file.

    A program gets its score by birth. To set its own it would have to be dumpable before it has become the program,
    and the agent could look into a copy of init.
    """

    def __init__(self) -> None:
        self.fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self.own = int(os.pread(self.fd, 16, 0))
        self.programs = max(self.own, PROGRAMS_SCORE)  # a higher one, as kubelets give it, cannot be lowered

    def fork(self) -> int:
        """`os.fork`, with the child's score raised. Raises OSError."""
        pid = -1
        self.write(self.programs)
        try:
            pid = os.fork()
        finally:
            if pid != 0:  # the child's descriptor, too, is of init's file
                self.write(self.own)
        return pid

    def write(self, score: int) -> None:
        os.pwrite(self.fd, str(score).encode(), 0)


class OomCounter:
    """Reads one of `COUNTERS`; 0 for ever where there is none."""

    def __init__(self) -> None:
        self.path = next((path for path in COUNTERS if read(path) is not None), "")

    def count(self) -> int:
        """How many processes it killed so far."""
        return (read(self.path) or 0) if self.path else 0


def read(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
