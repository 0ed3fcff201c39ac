"""The system-call filter, run by a small interpreter of classic BPF written from the kernel's description."""

from __future__ import annotations

import errno
import struct

import pytest

from openforgerl.sandboxes import seccomp

ALLOW = 0x7FFF0000
X86, ARM = 0xC000003E, 0xC00000B7


def run(program: bytes, number: int, arch: int = X86, args: tuple[int, ...] = ()) -> int:
    """The filter's verdict for one call."""
    words = [*args, *[0] * (6 - len(args))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    steps = list(struct.iter_unpack("<HBBI", program))
    register, at = 0, 0
    while True:
        code, true, false, value = steps[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
        elif code == 0x15:
            at += true if register == value else false
        elif code == 0x35:
            at += true if register >= value else false
        elif code == 0x45:
            at += true if register & value else false
        else:
            assert code == 0x06
            return value


def refused(error: int) -> int:
    return 0x00050000 | error


@pytest.fixture(params=[(X86, "x86_64", 41, 302, 319), (ARM, "aarch64", 198, 261, 279)])
def machine(request):
    return request.param


def test_sockets_only_of_families_that_a_net_namespace_holds(machine):
    arch, name, socket_call, _, _ = machine
    program = seccomp.program(forbid_memory_files=False, machine=name)
    for family in range(50):
        verdict = ALLOW if family in (1, 2, 10, 16) else refused(errno.EAFNOSUPPORT)
        assert run(program, socket_call, arch, (family, 1, 0)) == verdict


def test_limits_of_all_but_init_may_be_changed(machine):
    arch, name, _, prlimit, _ = machine
    program = seccomp.program(forbid_memory_files=False, machine=name)
    assert run(program, prlimit, arch, (0, 7)) == ALLOW
    assert run(program, prlimit, arch, (2, 7)) == ALLOW
    assert run(program, prlimit, arch, (1, 7)) == refused(errno.EPERM)


def test_priorities_only_of_one_process_that_is_not_init():
    program = seccomp.program(forbid_memory_files=False, machine="x86_64")
    setpriority, ioprio_set = 141, 251
    assert run(program, setpriority, args=(0, 0, 5)) == ALLOW
    assert run(program, setpriority, args=(0, 1, 5)) == refused(errno.EPERM)
    assert run(program, setpriority, args=(2, 1000, 5)) == refused(errno.EPERM)
    assert run(program, ioprio_set, args=(1, 7, 0)) == ALLOW
    assert run(program, ioprio_set, args=(3, 1000, 0)) == refused(errno.EPERM)


def test_memory_files_are_refused_where_nothing_counts_them(machine):
    arch, name, _, _, memfd = machine
    assert run(seccomp.program(forbid_memory_files=False, machine=name), memfd, arch) == ALLOW
    assert run(seccomp.program(forbid_memory_files=True, machine=name), memfd, arch) == refused(errno.ENOSYS)


@pytest.mark.parametrize(("arch", "name", "clone"), [(X86, "x86_64", 56), (ARM, "aarch64", 220)])
def test_children_and_threads_but_no_namespaces(arch, name, clone):
    program = seccomp.program(forbid_memory_files=False, machine=name)
    thread, fork, vfork = 0x3D0F00, 0x1200011, 0x4111
    for flags in (0, 17, thread, fork, vfork, 0x1FF & ~0x80):
        assert run(program, clone, arch, (flags,)) == ALLOW
    for kind in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(program, clone, arch, (kind | 17,)) == refused(errno.EPERM)
    assert run(program, 435, arch) == refused(errno.ENOSYS)  # what a kernel before 5.3 says


def test_mounting_tracing_kernels_and_keys_are_refused_and_work_is_not():
    program = seccomp.program(forbid_memory_files=False, machine="x86_64")
    for number in (165, 166, 272, 308, 321, 298, 425, 250, 161, 304, 429):  # mount .. move_mount
        assert run(program, number) == refused(errno.EPERM)
    for number in (0, 1, 9, 56, 57, 58, 59, 61, 62, 101, 202, 257):  # read .. openat; clone, fork and ptrace among them
        assert run(program, number) == ALLOW


def test_other_calling_conventions_do_not_get_round_it():
    program = seccomp.program(forbid_memory_files=False, machine="x86_64")
    assert run(program, 11, arch=0x40000003) == refused(errno.ENOSYS)  # i386
    assert run(program, 0x40000000 + 1) == refused(errno.ENOSYS)  # x32


def test_an_unknown_machine_has_no_filter():
    assert seccomp.supported("x86_64") and not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.program(forbid_memory_files=False, machine="riscv64")
