"""PID 1 of a process sandbox: this package, standard library only, relative imports only,
run by the system's Python with `-I -S`.

It never runs agent code in its own process. It takes framed commands over an inherited stream socket, starts
programs, reads and writes files, kills, and reaps. The agent has the same uid, so init is made undumpable
(no ptrace, no /proc/1/fd or /proc/1/mem) before the first program starts, keeps no descriptor but the control
socket (closed on exec), and has no signal handler but SIGCHLD's: the kernel drops every other signal that comes
from inside the pid namespace, SIGKILL and SIGSTOP too. The end of the control socket ends the sandbox.

`argv`: control fd, port to listen on, 1 to be undumpable, a word by which
the host finds us.
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

from .files import Export, Files
from .frames import CHUNK, Control, Header, Refused
from .processes import PR_SET_DUMPABLE, Job, Process, processes, signal_all


class Init:
    """The command loop."""

    def __init__(self, control: Control, woken: int) -> None:
        self.control = control
        self.woken = woken
        self.jobs: dict[int, Job] = {}
        self.settings: Header = {}
        self.files = Files(plain=True)
        self.next_watch = 0.0
        self.poll = select.poll()
        self.poll.register(control.socket.fileno(), select.POLLIN)
        self.poll.register(woken, select.POLLIN)

    def run(self) -> None:
        """Until the control socket ends."""
        while True:
            for fd, _ in self.poll.poll(self.wait_ms()):
                if fd == self.control.socket.fileno():
                    for header, payload in self.control.receive():
                        self.command(header, payload)
                elif fd == self.woken:
                    os.read(self.woken, 4096)
                else:
                    self.stream(fd)
            self.reap()
            now = time.monotonic()
            for job in list(self.jobs.values()):
                if now >= job.deadline and not job.timed_out:
                    job.timed_out = True
                    self.kill_tree(job)
            if self.settings and now >= self.next_watch:
                self.next_watch = now + self.settings["tick"]
                self.watch()

    def wait_ms(self) -> int | None:
        times = [job.deadline for job in self.jobs.values() if not job.timed_out]
        if self.settings:
            times.append(self.next_watch)
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
        try:
            answer = getattr(self, "do_" + header["op"])(header, payload)
        except Refused as error:
            answer = {"error": str(error), "kind": error.kind}
        except OSError as error:
            answer = {"error": f"{header['op']}: {error}", "kind": "io"}
        if answer is not None:
            self.control.send({"id": header["id"], "done": True, **answer})

    def do_start(self, header: Header, payload: bytes) -> Header:
        del payload
        self.settings = header
        self.files = Files(plain=header["plain_files"])
        # Bubblewrap tells the host of every namespace but this one, and the host may not look into us.
        return {"user_namespace": os.stat("/proc/self/ns/user").st_ino}

    def do_exec(self, header: Header, payload: bytes) -> None:
        job = Job(header, payload)
        job.spawn(header, self.settings)
        self.jobs[job.pid] = job
        if job.gate != -1:
            self.control.send({"id": job.id, "started": job.pid})
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
            self.control.send({"id": header["id"], "data": True}, data[start : start + CHUNK])
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
            "done": True,
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "timed_out": job.timed_out,
            "oom": job.oom,
            "seconds": time.monotonic() - job.begun,
            "stdout": len(tails[0]),
        }
        self.control.send(header, tails[0] + tails[1])

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
            os.kill(max(alive.values(), key=lambda item: item.rss).pid, signal.SIGKILL)

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


def main() -> None:
    """See the module's docstring."""
    fd, port, undumpable = (int(word) for word in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would let the agent's SIGINT in
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    if undumpable and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_DUMPABLE) failed")
    control = Control(fd)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        control.send_listener(listener)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    try:
        Init(control, wake_on_child()).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the host is gone; the kernel kills the rest of the namespace with us
