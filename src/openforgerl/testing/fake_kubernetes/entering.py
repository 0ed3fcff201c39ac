"""Run by path in a process of its own: `entering.py PID WORKDIR UID GID PROGRAM...` runs a program where PID lives.

The namespaces belong to the user namespace that bubblewrap made first, the process itself lives in one below that.
An ordinary user may enter the first as its owner, and from there the rest.
"""

import ctypes
import fcntl
import os
import sys

NS_GET_USERNS = 0xB701
PR_SET_NO_NEW_PRIVS = 38


def _enter(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(words: list[str]) -> int:
    """Enter, fork into the pid namespace, run; the program's exit code."""
    pid, workdir, uid, gid, *program = words
    libc = ctypes.CDLL(None, use_errno=True)
    if os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
        _enter(libc, os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))  # it belongs to the machine's own user namespace
    names = ("ipc", "uts", "pid", "mnt")
    spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    own = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    first = fcntl.ioctl(spaces[-1], NS_GET_USERNS)
    same = os.fstat(first).st_ino == os.fstat(own).st_ino
    _enter(libc, first)
    for space in spaces:
        _enter(libc, space)
    if not same:
        _enter(libc, own)
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(workdir)
    child = os.fork()
    if child == 0:
        try:
            os.execvp(program[0], program)
        except OSError as error:
            os.write(2, f"exec: {program[0]!r}: {error.strerror}\n".encode())
            os._exit(126 if isinstance(error, PermissionError) else 127)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
