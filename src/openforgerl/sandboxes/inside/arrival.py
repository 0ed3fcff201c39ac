"""How the control socket comes about: inherited, connected to a path, or dialled over TCP and dialled again.

Only a dialled one may be lost without ending the sandbox: whoever directs us may restart or move.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time

from .frames import Header

MOST_ANSWER = 8192
FINAL = (401, 403, 404, 409, 410)
"""HTTP statuses that say: this attempt is over, or was never yours. All others are worth another try."""


class Over(Exception):
    """Nobody wants this sandbox any more."""


class Dial:
    """A TCP connection that becomes the control socket by HTTP/1.1 Upgrade; never blocks but for a name's address.

    settings: `host`, `port`, `path`, `token_env` or `token_file` (where the attempt's credential is), `patience`
    (seconds without a connection after which the sandbox ends), `forward` (host and port of the proxy, or none).
    """

    def __init__(self, settings: Header) -> None:
        self.settings = settings
        self.token = credential(settings)
        self.tries = 0
        self.next_try = 0.0
        self.lost_at = time.monotonic()
        self.socket: socket.socket | None = None
        self.asked = False
        self.answer = bytearray()
        self.give_up_at = 0.0

    def fileno(self) -> int:
        return self.socket.fileno() if self.socket is not None else -1

    def events(self) -> int:
        return select.POLLIN if self.asked else select.POLLOUT

    def wake_at(self) -> float:
        return self.give_up_at if self.socket is not None else self.next_try

    def lose(self) -> None:
        """The connection that was in use is gone."""
        self.lost_at = time.monotonic()
        self.tries = 0
        self.next_try = self.lost_at

    def turn(self, ready: bool) -> socket.socket | None:
        """Do what can be done now; the connection when it stands, with what came behind the answer in `answer`.

        `ready`: the socket has what `events` asks for. Raises Over.
        """
        now = time.monotonic()
        if now - self.lost_at > self.settings["patience"]:
            raise Over
        try:
            if self.socket is None:
                if now >= self.next_try:
                    self.begin(now)
                return None
            if now > self.give_up_at:
                raise TimeoutError
            if not ready:
                return None
            if self.asked:
                return self.listen()
            self.ask()
            return None
        except (OSError, ValueError):
            self.drop(now)
            return None

    def begin(self, now: float) -> None:
        self.asked = False
        self.answer.clear()
        self.give_up_at = now + 10.0
        # bytes: a str would be encoded as IDNA, a module that is not here
        host: str = self.settings["host"]
        found = socket.getaddrinfo(host.encode(), self.settings["port"], type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[self.tries % len(found)]
        self.socket = socket.socket(family, kind, protocol)
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(address)

    def ask(self) -> None:
        """The connection stands, or could not be made."""
        assert self.socket is not None
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        words = f"GET {self.settings['path']} HTTP/1.1\r\nHost: {self.settings['host']}:{self.settings['port']}\r\n"
        words += f"Connection: Upgrade\r\nUpgrade: openforgerl-sandbox\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        self.socket.send(words.encode())  # far below any socket's buffer
        self.asked = True

    def listen(self) -> socket.socket | None:
        assert self.socket is not None
        try:
            data = self.socket.recv(MOST_ANSWER)
        except BlockingIOError:
            return None
        self.answer += data
        if b"\r\n\r\n" not in self.answer:
            if not data or len(self.answer) > MOST_ANSWER:
                raise OSError("no answer")
            return None
        head, _, rest = bytes(self.answer).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status in FINAL:
            raise Over
        if status != 101:
            raise OSError(f"status {status}")
        self.answer = bytearray(rest)
        done, self.socket = self.socket, None
        self.tries = 0
        keep_alive(done)
        return done

    def drop(self, now: float) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        self.tries += 1
        spread = 0.5 + os.urandom(1)[0] / 255  # sandboxes that were cut off together do not come back as one
        self.next_try = now + min(0.1 * 2**self.tries, 10.0) * spread


def keep_alive(end: socket.socket) -> None:
    """A host that vanishes without a word is found out in about half a minute."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def credential(settings: Header) -> str:
    """The attempt's credential, which no agent program can find afterwards.

    Our environment is not inherited by programs, and /proc/1/environ is closed; a file must be gone before any runs.
    """
    if "token_env" in settings:
        return os.environ.pop(settings["token_env"])
    with open(settings["token_file"], encoding="ascii") as file:
        token = file.read().strip()
    os.unlink(settings["token_file"])
    return token


def inherited(fd: int) -> socket.socket:
    """A connected stream socket that stands open in this process."""
    return socket.socket(fileno=fd)


def connected(path: str, seconds: float = 30.0) -> socket.socket:
    """To a Unix socket of the host, which appears in a mounted directory and is unlinked once we are in."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    limit = time.monotonic() + seconds
    while True:
        try:
            end.connect(path)
            return end
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)


def settings_of(word: str) -> Header:
    """The settings of `dial`: JSON in the word itself."""
    return json.loads(word)
