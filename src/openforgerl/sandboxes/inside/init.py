"""PID 1 of a sandbox: this package, standard library only, relative imports only,
run by a Python with `-I -S`.

It never runs agent code in its own process. It takes framed commands over one stream socket, starts
programs, reads and writes files, kills, and reaps. The agent has the same uid, so init is made undumpable
(no ptrace, no /proc/1/fd, /proc/1/mem or /proc/1/environ) before the first program starts, keeps no descriptor but
the control socket (closed on exec), and has no signal handler but SIGCHLD's: the kernel drops every other signal that
comes from inside the pid namespace, SIGKILL and SIGSTOP too.

`argv` says how the control socket comes about (`arrival.py`):

* `inherit FD PORT UNDUMPABLE WORD` and `connect PATH PORT UNDUMPABLE WORD`: a Unix socket; the hello is one byte with
  the socket that listens on 127.0.0.1:PORT. The end of the control socket ends the sandbox. WORD is how the host
  finds us.
* `dial SETTINGS`: over TCP. The hello is a frame: the namespaces, the last command seen, and each program that has a
  key, or whose end the host has not acknowledged. When the connection is lost, programs go on and init dials again, by
  the credential that the host gave it last; what the host sends twice is done once. `forward` in SETTINGS: connections
  to 127.0.0.1:`listen` are carried to that address.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

from .arrival import Dial, Over, connected, inherited, settings_of
from .files import Export, Files
from .frames import CHUNK, Control, Header, Refused
from .memory import OomCounter, OomScore
from .processes import Job, Process, processes, signal_all
from .relay import Relay

PR_SET_DUMPABLE = 4
SEND_PATIENCE = 60.0
"""Seconds for a dialled host to take what is sent before the connection counts as lost."""
MOST_KEPT = 16
"""Ends of programs with a key that are kept after the host had them."""


class Init:
    """The command loop."""

    def __init__(self, control: Control | None, woken: int, score: OomScore, dial: Dial | None = None) -> None:
        self.control = control
        self.dial = dial
        self.woken = woken
        self.score = score
        self.jobs: dict[int, Job] = {}
        self.kept: dict[int, tuple[Header, bytes]] = {}
        """Ends of programs that a host that may come back has not acknowledged; of those with a key, the last ones
        even so: it may die with what it has heard and not written down."""
        self.last = 0
        self.settings: Header = {}
        self.files = Files(plain=True)
        self.oom_kills = OomCounter()
        self.next_watch = 0.0
        self.poll = select.poll()
        self.poll.register(woken, select.POLLIN)
        self.relay: Relay | None = None
        if control is not None:
            self.poll.register(control.socket.fileno(), select.POLLIN)

    def run(self) -> None:
        """Until the control socket ends; a dialled one, until nobody wants it any more."""
        while True:
            try:
                self.turn()
            except EOFError:
                if self.dial is None:
                    raise
                self.part(self.dial)

    def turn(self) -> None:
        """Wait for something and deal with it."""
        dialled = self.dial.fileno() if self.dial is not None and self.control is None else -1
        if self.dial is not None and dialled != -1:
            self.poll.register(dialled, self.dial.events())
        ready = self.poll.poll(self.wait_ms())
        if dialled != -1:
            self.poll.unregister(dialled)
        for fd, _ in ready:
            if self.control is not None and fd == self.control.socket.fileno():
                for header, payload in self.control.receive():
                    self.command(header, payload)
            elif fd == self.woken:
                os.read(self.woken, 4096)
            elif fd != dialled and (self.relay is None or not self.relay.takes(fd)):
                self.stream(fd)
        if self.dial is not None and self.control is None:
            self.arrive(self.dial, dialled in [fd for fd, _ in ready])
        self.reap()
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if now >= job.deadline and not job.timed_out:
                job.timed_out = True
                self.kill_tree(job)
        if self.settings and now >= self.next_watch:
            self.next_watch = now + self.settings["tick"]
            self.watch()

    def arrive(self, dial: Dial, ready: bool) -> None:
        """One step on the way to the host; the hello when it is reached."""
        end = dial.turn(ready)
        if end is None:
            return
        control = Control(end, SEND_PATIENCE)
        self.control = control
        self.poll.register(end.fileno(), select.POLLIN)
        programs = [[job.id, job.key, True] for job in self.jobs.values()]
        programs += [[number, header["key"], False] for number, (header, _) in self.kept.items()]
        control.send({"id": 0, "hello": 1, "last": self.last, "programs": programs, **namespaces()})
        for header, payload in control.frames(bytes(dial.answer)):
            self.command(header, payload)

    def part(self, dial: Dial) -> None:
        """The dialled connection is gone: programs go on, and we dial again."""
        if self.control is not None:
            self.forget(self.control.socket.detach())  # unregisters and closes
            self.control = None
            dial.lose()

    def say(self, header: Header, payload: bytes | bytearray | memoryview = b"") -> None:
        if self.control is not None:
            self.control.send(header, payload)

    def wait_ms(self) -> int | None:
        times = [job.deadline for job in self.jobs.values() if not job.timed_out]
        if self.settings:
            times.append(self.next_watch)
        if self.dial is not None and self.control is None:
            times.append(self.dial.wake_at())
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def stream(self, fd: int) -> None:
        for job in self.jobs.values():
            if fd == job.input:
                job.feed()
                if job.input == -1:
                    self.poll.unregister(fd)
                return
            if fd in job.outputs:
                if not job.drain(fd):
                    self.poll.unregister(fd)
                return

    def command(self, header: Header, payload: bytes) -> None:
        self.last = max(self.last, header["id"])
        work = getattr(self, "do_" + header["op"], None)
        try:
            if work is None:  # of a host that is newer than we are
                raise Refused(f"{header['op']!r} is no command of this init")
            answer = work(header, payload)
        except Refused as error:
            answer = {"error": str(error), "kind": error.kind}
        except OSError as error:
            answer = {"error": f"{header['op']}: {error}", "kind": "io"}
        if answer is not None:
            self.say({"id": header["id"], "done": True, **answer})

    def do_ping(self, header: Header, payload: bytes) -> Header:
        """For a host that wants to know whether we are still there."""
        del header, payload
        return {}

    def do_ack(self, header: Header, payload: bytes) -> None:
        """The host has a program's end. It may ask once more for that of one with a key."""
        del payload
        ended = self.kept.get(header["target"])
        if ended is not None and not ended[0]["key"]:
            del self.kept[header["target"]]

    def do_credential(self, header: Header, payload: bytes) -> Header:
        """By what the next connection is to be made; the one before is dead once this is answered."""
        del payload
        if self.dial is not None:
            self.dial.token = header["token"]
        return {}

    def do_claim(self, header: Header, payload: bytes) -> None:
        """Send a program's end (again) when there is one; else it comes when it comes. For a host that took over."""
        del payload
        number = header["target"]
        if number in self.kept:
            self.say(*self.kept[number])
        elif not any(job.id == number for job in self.jobs.values()):
            self.say({"id": number, "done": True, "error": f"program {number} is not known here", "kind": "input"})

    def do_start(self, header: Header, payload: bytes) -> Header:
        del payload
        self.settings = header
        self.files = Files(plain=header["plain_files"])
        return {**namespaces(), "status": own_status(), "oom_counter": self.oom_kills.path}

    def do_exec(self, header: Header, payload: bytes) -> None:
        number = header["id"]
        if number in self.kept or any(job.id == number for job in self.jobs.values()):
            self.do_claim({"target": number}, b"")  # sent twice, by a host that lost the connection in between
            return
        job = Job(header, payload)
        job.oom_kills_before = self.oom_kills.count()
        job.spawn(header, self.settings, self.score)
        self.jobs[job.pid] = job
        if job.gate != -1:
            self.say({"id": job.id, "started": job.pid})
        for fd in job.outputs:
            self.poll.register(fd, select.POLLIN)
        self.poll.register(job.input, select.POLLOUT)

    def do_go(self, header: Header, payload: bytes) -> None:
        """The host has put the forked process where it is counted: let it become the program."""
        del payload
        for job in self.jobs.values():
            if job.id == header["target"]:
                job.open_gate(b"!")

    def do_cancel(self, header: Header, payload: bytes) -> None:
        del payload
        for job in self.jobs.values():
            if job.id == header["target"]:
                job.timed_out = True
                self.kill_tree(job)

    def do_read(self, header: Header, payload: bytes) -> Header:
        del payload
        data = memoryview(self.files.read(header["path"], header["limit"]))
        for start in range(0, len(data), CHUNK):
            self.say({"id": header["id"], "data": True}, data[start : start + CHUNK])
        return {}

    def do_write(self, header: Header, payload: bytes) -> Header:
        self.files.write(header["path"], payload, header["offset"], header["mode"])
        return {}

    def do_directory(self, header: Header, payload: bytes) -> Header:
        del payload
        self.files.make_directory(header["path"])
        return {}

    def do_export(self, header: Header, payload: bytes) -> None:
        del payload
        if self.control is not None:
            Export(self.control, self.files, header).run(header["paths"])

    def do_kill(self, header: Header, payload: bytes) -> Header:
        """SIGKILL to all until /proc shows only us. What is left at the deadline is named."""
        del payload
        deadline = time.monotonic() + header["timeout"]
        while True:
            if header["complete"]:
                signal_all(signal.SIGKILL)
            else:
                for pid in self.jobs:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            self.reap()
            left = processes()
            if not left or not header["complete"] or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return {"survivors": [[item.pid, item.name, item.state] for item in left.values()][:50]}

    def kill_tree(self, job: Job) -> None:
        """Kill the job's process, its descendants, and every orphan that was not there when it began.

        An orphan (a child of init that no command started) may come from any job. All are stopped first, so
        that a fork storm cannot outrun the walk.
        """
        for _ in range(50):
            signal_all(signal.SIGSTOP)
            alive = processes()
            doomed = [item for item in alive.values() if item.state != "Z" and self.belongs(item, alive, job)]
            if not doomed:
                break
            for item in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(item.pid, signal.SIGKILL)
            time.sleep(0.002)
        signal_all(signal.SIGCONT)

    def belongs(self, item: Process, alive: dict[int, Process], job: Job) -> bool:
        while item.pid not in self.jobs and item.parent in alive:
            item = alive[item.parent]
        if item.pid in self.jobs:
            return item.pid == job.pid
        return (item.pid, item.start) not in job.before

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                continue  # a child that asked us to trace it has stopped, and may have no other end than its deadline
            job = self.jobs.pop(pid, None)
            if job is not None:
                self.finish(job, status)

    def finish(self, job: Job, status: int) -> None:
        """The program itself has ended; its background children, if any, keep running and may hold the pipes."""
        tails: list[bytes] = []
        for fd in job.outputs:
            job.drain(fd)
            self.forget(fd)
            tails.append(bytes(job.outputs[fd][-job.limit :]) if job.limit else b"")
        if job.input != -1:
            self.forget(job.input)
        job.open_gate(b"")
        signaled = os.WIFSIGNALED(status)
        header = {
            "id": job.id,
            "key": job.key,
            "done": True,
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "timed_out": job.timed_out,
            "oom": job.oom or self.oom_kills.count() > job.oom_kills_before,
            "seconds": time.monotonic() - job.begun,
            "stdout": len(tails[0]),
        }
        if self.dial is not None:
            self.kept[job.id] = (header, tails[0] + tails[1])
            for number in [number for number, (ended, _) in self.kept.items() if ended["key"]][:-MOST_KEPT]:
                del self.kept[number]
        self.say(header, tails[0] + tails[1])

    def forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # already unregistered at its end of stream
            self.poll.unregister(fd)
        os.close(fd)

    def watch(self) -> None:
        """What no cgroup bounds here: resident memory and processes of all together, inodes of each tmpfs."""
        for path in self.settings["writable"]:
            room = os.statvfs(path)
            if room.f_files - room.f_ffree > self.settings["most_inodes"] > 0:
                self.overrun()
                signal_all(signal.SIGKILL)
        most: int | None = self.settings["most_memory"]
        if most is None:
            return
        alive = processes()
        if sum(item.rss for item in alive.values()) > most:
            self.overrun()
            largest = max(alive.values(), key=lambda item: item.rss)
            with contextlib.suppress(ProcessLookupError):  # its parent may have reaped it since
                os.kill(largest.pid, signal.SIGKILL)

    def overrun(self) -> None:
        for job in self.jobs.values():
            job.oom = True


def wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, _woken)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _woken(number: int, frame: object) -> None:
    """Only the write to the wakeup descriptor matters."""


def namespaces() -> Header:
    """Inode of each of our namespaces: the host may not be able to look into us."""
    names = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")  # an undumpable process may not list its own
    return {"namespaces": {name: os.stat("/proc/self/ns/" + name).st_ino for name in names}}


def own_status() -> dict[str, str]:
    """What the kernel says of init, which every program inherits."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line]
    return {
        name: " ".join(value.split())
        for name, value in lines
        if name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Uid")
    }


def main() -> None:
    """See the module's docstring."""
    if os.getpid() != 1:
        sys.exit("init must be PID 1 of its own pid namespace: it kills every process that it can signal")
    mode = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would let the agent's SIGINT in
    fd = int(sys.argv[2]) if mode == "inherit" else 2
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    score = OomScore()
    if (mode == "dial" or sys.argv[4] == "1") and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        sys.exit("prctl(PR_SET_DUMPABLE) failed")
    if mode == "dial":
        init = dialling(settings_of(sys.argv[2]), score)
    else:
        control = Control(inherited(fd) if mode == "inherit" else connected(sys.argv[2]))
        with listening(int(sys.argv[3])) as listener:
            control.send_listener(listener)
        init = Init(control, wake_on_child(), score)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2) if mode == "inherit" else (0, 1):  # an engine keeps what we say last
        os.dup2(null, number)
    os.close(null)
    try:
        init.run()
    except (EOFError, Over):
        os._exit(0)  # the host is gone; the kernel kills the rest of the namespace with us


def dialling(settings: Header, score: OomScore) -> Init:
    """Init that reaches its host over TCP, and its proxy through a relay of our own when there is `forward`."""
    init = Init(None, wake_on_child(), score, Dial(settings))
    if settings.get("forward"):
        host, port = settings["forward"]
        init.relay = Relay(listening(settings["listen"]), (host, port), init.poll)
    return init


def listening(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener
