"""The system-call filter of a sandbox, assembled as classic BPF (Linux `seccomp(2)`, `linux/filter.h`).

Namespaces leave gaps that this closes: vsock reaches the hypervisor from any net namespace, `prlimit` and the
scheduler calls may change any process of the same uid (our init has the agent's uid), keyrings and memfds
escape the mount and memory limits.
"""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_X32_BIT = 0x40000000

_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: all that a net namespace contains."""

_CALLS = """
    socket socketpair prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority
    ioprio_set memfd_create memfd_secret shmget bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register add_key request_key keyctl kexec_load kexec_file_load init_module finit_module
    delete_module mount umount2 pivot_root unshare setns open_tree move_mount fsopen fsconfig fsmount fspick
    mount_setattr swapon swapoff reboot chroot open_by_handle_at kcmp quotactl acct syslog vhangup clone clone3
"""
_NUMBERS = {
    # asm/unistd_64.h and asm-generic/unistd.h, in the order of _CALLS
    "x86_64": (
        "41 53 302 203 144 142 314 141 251 319 447 29 321 298 323 425 426 427 248 249 250 246 320 175 313 176 "
        "165 166 155 272 308 428 429 430 431 432 433 442 167 168 169 161 304 312 179 163 103 153 "
        "56 435"
    ),
    "aarch64": (
        "198 199 261 122 119 118 274 140 30 279 447 194 280 241 282 425 426 427 217 218 219 104 294 105 273 106 "
        "40 39 41 97 268 428 429 430 431 432 433 442 224 225 142 51 265 272 60 89 116 58 "
        "220 435"
    ),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_MEMORY_FILES = ("memfd_create", "memfd_secret", "shmget")
_FIRST_ARGUMENT_PID = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_WHICH_AND_WHO = {"setpriority": 0, "ioprio_set": 1}
"""Call → value of its first argument that means "one process"."""


_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW* of clone(2). In a user namespace of its own a program has every capability."""


def supported(machine: str | None = None) -> bool:
    """Whether there is a filter for this machine."""
    return (machine or platform.machine()) in _AUDIT_ARCH


def program(*, forbid_memory_files: bool, machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`.

    `forbid_memory_files`: also refuse memfd and System V memory, whose pages no process shows while they are
    unmapped; used where no cgroup counts them. `machine` as `platform.machine()`; KeyError if not supported.
    """
    name = machine or platform.machine()
    number: dict[str, int] = dict(zip(_CALLS.split(), map(int, _NUMBERS[name].split()), strict=True))
    code = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQ, 1, 0, _AUDIT_ARCH[name]),
        _refuse(errno.ENOSYS),
        (_LOAD, 0, 0, _OFFSET_NR),
    ]
    if name == "x86_64":
        code += [(_JUMP_GE, 0, 1, _X32_BIT), _refuse(errno.ENOSYS)]
    conditional = {"clone", "clone3", "socket", "socketpair", *_FIRST_ARGUMENT_PID, *_WHICH_AND_WHO}
    for call in _CALLS.split():
        if call in conditional or (call in _MEMORY_FILES and not forbid_memory_files):
            continue
        code += _on(number[call], [_refuse(errno.ENOSYS if call in _MEMORY_FILES else errno.EPERM)])
    for call in ("socket", "socketpair"):
        allowed = [step for family in _FAMILIES for step in ((_JUMP_EQ, 0, 1, family), (_RETURN, 0, 0, _ALLOW))]
        code += _on(number[call], [_argument(0), *allowed, _refuse(errno.EAFNOSUPPORT)])
    init_only = [(_JUMP_EQ, 0, 1, 1), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    code += _on(
        number["clone"],
        [_argument(0), (_JUMP_SET, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)],
    )
    code += _on(number["clone3"], [_refuse(errno.ENOSYS)])  # its flags lie in memory; a C library takes clone then
    for call in _FIRST_ARGUMENT_PID:
        code += _on(number[call], [_argument(0), *init_only])
    for call, one_process in _WHICH_AND_WHO.items():
        groups = [(_JUMP_EQ, 1, 0, one_process), _refuse(errno.EPERM)]
        code += _on(number[call], [_argument(0), *groups, _argument(1), *init_only])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *step) for step in code)


_Step = tuple[int, int, int, int]


def _on(number: int, body: list[_Step]) -> list[_Step]:
    """`body` when the loaded call number equals `number`; every body ends in a return."""
    return [(_JUMP_EQ, 0, len(body), number), *body]


def _argument(index: int) -> _Step:
    """Load the low 32 bits of an argument (both machines are little-endian)."""
    return (_LOAD, 0, 0, _OFFSET_ARGS + 8 * index)


def _refuse(error: int) -> _Step:
    return (_RETURN, 0, 0, _ERRNO | error)
