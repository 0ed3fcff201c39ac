"""What the kernel killed for want of memory, counted by the cgroup that we are in, where it is shown to us."""

from __future__ import annotations

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Version 2 and 1, as an engine mounts them into a container. A process sandbox has neither."""


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
