"""Programs inside the sandbox: what /proc shows, and the ones the host asked for."""

from __future__ import annotations

import binascii
import ctypes
import errno
import os
import resource
import signal
import time

from .frames import Header
from .memory import OomScore

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
PAGE = resource.getpagesize()


class Process:
    """One line of /proc: `start` in clock ticks since boot, `rss` in bytes."""

    __slots__ = ("name", "parent", "pid", "rss", "start", "state")

    def __init__(self, pid: int, text: str) -> None:
        self.pid = pid
        self.name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        self.state = fields[0]
        self.parent = int(fields[1])
        self.start = int(fields[19])
        self.rss = int(fields[21]) * PAGE


def processes() -> dict[int, Process]:
    """Every process of the namespace but init, zombies included."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open("/proc/" + name + "/stat", encoding="utf-8", errors="replace") as file:
                found[int(name)] = Process(int(name), file.read())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between listing and reading
    return found


def signal_all(number: int) -> None:
    """To every process but init, at once: the kernel walks the list under a lock that a fork needs too."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return


class Job:
    """A program that the host asked for."""

    def __init__(self, header: Header, stdin: bytes) -> None:
        self.id: int = header["id"]
        self.key: str = header.get("key", "")
        self.limit: int = header["output_limit"]
        self.begun = time.monotonic()
        self.deadline: float = self.begun + header["timeout"]
        self.stdin = memoryview(stdin)
        self.pid = 0
        self.before: set[tuple[int, int]] = set()
        self.oom = False
        self.oom_kills_before = 0
        self.timed_out = False
        self.input = -1
        self.gate = -1
        self.outputs: dict[int, bytearray] = {}

    def spawn(self, header: Header, settings: Header, score: OomScore) -> None:
        """Fork and exec; a program that cannot be executed ends as the shell says it: 127, or 126."""
        self.before = {(item.pid, item.start) for item in processes().values()}
        child_in, self.input = os.pipe()
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        child_gate, self.gate = os.pipe() if header["gate"] else (-1, -1)
        self.outputs = {out: bytearray(), err: bytearray()}
        try:
            self.pid = score.fork()
        except OSError:
            for fd in {child_in, self.input, out, child_out, err, child_err, child_gate, self.gate} - {-1}:
                os.close(fd)
            raise
        if self.pid == 0:
            try:
                for number, fd in enumerate((child_in, child_out, child_err)):
                    os.dup2(fd, number)
                if child_gate != -1:
                    os.close(self.gate)
                    if os.read(child_gate, 1) != b"!":
                        os._exit(125)
                become_agent(header, settings)
            except OSError as error:
                os.write(2, f"{header['argv'][0]}: {error.strerror}\n".encode())
                os._exit(127 if error.errno == errno.ENOENT else 126)
            except BaseException as error:  # noqa: BLE001 - a forked child must never return into init's loop
                os.write(2, f"sandbox init: {error!r}\n".encode())
                os._exit(125)
        for fd in {child_in, child_out, child_err, child_gate} - {-1}:
            os.close(fd)
        for fd in (self.input, out, err):
            os.set_blocking(fd, False)

    def open_gate(self, word: bytes) -> None:
        """Let the forked process go on (`!`) or end; idempotent."""
        if self.gate != -1:
            os.write(self.gate, word)
            os.close(self.gate)
            self.gate = -1

    def feed(self) -> None:
        """Write what fits of standard input; close it at its end."""
        try:
            while self.stdin:
                self.stdin = self.stdin[os.write(self.input, self.stdin[:65536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.stdin = self.stdin[:0]
        os.close(self.input)
        self.input = -1

    def drain(self, fd: int, rounds: int = 16) -> bool:
        """Read what is there, keep the tail; False at the end of the stream."""
        tail = self.outputs[fd]
        for _ in range(rounds):
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            tail += data
            if len(tail) > 2 * self.limit + 65536:
                del tail[: -self.limit or None]
        return True


class Filter(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def restrict(code: bytes) -> None:
    """No new privileges, and the host's system-call filter, where nobody has put them on init already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if code:
        program = Filter(len(code) // 8, code)
        if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")


def become_agent(header: Header, settings: Header) -> None:
    """In the forked child: everything between fork and exec. Raises OSError.

    As undumpable as init, whose memory it has, until exec makes it dumpable: nothing here may need /proc/self.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    for name, value in settings["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]  # may be lower already, and cannot be raised
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    os.chdir(header["cwd"])
    restrict(binascii.a2b_base64(settings.get("filter", "")))
    os.execvpe(header["argv"][0], header["argv"], header["env"])
