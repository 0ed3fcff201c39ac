"""Trees of files between host and sandbox, as data: what arrives is checked again on this side."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from openforgerl.errors import InputError
from openforgerl.sandboxes.channel import Unsound

CHUNK = 4 << 20
MOST_PATH = 3000
"""Bytes of a path inside. The kernel takes 4095 in one word, with the destination's own path before it."""


class Tree:
    """Writes exported entries below `root`, a directory that only we write.

    Nothing in it can be a link (we create none), every file is created anew (O_EXCL), and names are checked
    here too: our init could have been subverted by the agent it guarded.
    """

    def __init__(self, root: Path, *, limit: int, entries: int, modes: int) -> None:
        """At most `limit` bytes and `entries` files and directories, as init was told."""
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise InputError(f"export destination {root} is not empty; give a new directory")
        self._root = root
        self._limits = (limit, entries)
        self._left, self._entries_left = self._limits
        self._modes = modes
        self._fd = -1
        self._mode = 0

    def take(self, header: dict[str, Any], data: bytes) -> None:
        """One frame of an export. Raises Unsound for one that no sound init sends."""
        kind = header.get("entry")
        if kind in ("directory", "file"):
            self.end()
            path = self._place(header.get("path"))
            try:
                self._make(kind, path, header.get("mode"))
            except (FileExistsError, NotADirectoryError) as error:
                raise Unsound(f"the same path twice: {header['path']!r:.300}") from error
        elif data:
            self._left -= len(data)
            if self._fd < 0 or self._left < 0:
                raise Unsound("more bytes than it was to send, or bytes of no file")
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]

    def _make(self, kind: str, path: Path, mode: object) -> None:
        if kind == "directory":
            path.mkdir(parents=True, exist_ok=True)
            return
        if type(mode) is not int:
            raise Unsound(f"a file's mode is {mode!r:.100}")
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._mode = mode & self._modes

    def restart(self) -> None:
        """Forget what came: the connection broke, and init begins anew."""
        self.end()
        self._left, self._entries_left = self._limits
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def end(self) -> None:
        """Close the file under way, if any."""
        if self._fd >= 0:
            os.fchmod(self._fd, self._mode)
            os.close(self._fd)
            self._fd = -1

    def _place(self, path: object) -> Path:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise Unsound("more files and directories than it was to send")
        parts = str(path).split("/")
        if parts[0] != "" or len(parts) < 2 or any(part in ("", ".", "..") or "\0" in part for part in parts[1:]):
            raise Unsound(f"the path {path!r:.300}")
        try:
            long = len(os.fsencode(str(path))) > MOST_PATH
        except UnicodeEncodeError as error:  # of characters that stand for no bytes
            raise Unsound(f"the path {path!r:.300}") from error
        if long:
            raise Unsound(f"a path of more than {MOST_PATH} bytes")
        return self._root.joinpath(*parts[1:])


def walk(source: Path, target: str) -> Iterator[tuple[str, Path, int | None]]:
    """(path inside, host path, mode; None for a directory) of a file or tree. Raises InputError for a link."""
    info = source.lstat()
    if stat.S_ISREG(info.st_mode):
        yield target, source, stat.S_IMODE(info.st_mode) & 0o777
    elif stat.S_ISDIR(info.st_mode):
        yield target, source, None
        for child in sorted(source.iterdir()):
            yield from walk(child, f"{target}/{child.name}")
    else:
        raise InputError(f"{source} is neither a regular file nor a directory; only those go into a sandbox")


async def pieces(source: Path) -> AsyncIterator[tuple[int, bytes]]:
    """(offset, bytes) of a host file; one empty piece for an empty file."""
    offset = 0
    with source.open("rb") as file:
        while (data := file.read(CHUNK)) or offset == 0:
            yield offset, data
            offset += len(data)
            if not data:
                break
