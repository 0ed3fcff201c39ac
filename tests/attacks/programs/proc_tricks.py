"""Open the kernel's writable knobs (without writing), and leave by /proc; print what could be opened."""

import os

for name in (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj",
    "/proc/1/root/etc/shadow",
    "/proc/self/root/../../etc/shadow",
    "/proc/1/cwd/usr/planted",
    "/proc/kcore",
    "/dev/mem",
    "/dev/vsock",
    "/dev/kmsg",
):
    try:
        os.close(os.open(name, os.O_WRONLY))
    except OSError:
        continue
    print(name, end=" ")
