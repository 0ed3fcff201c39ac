"""File access of init, for the host: nothing an agent left may lead it astray."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .frames import CHUNK, Control, Header, Refused

MOST_DEPTH = 64
MOST_PATH = 3000
"""Bytes: whoever takes an export writes it below a directory of its own, with 4095 in all."""
MOST_SKIPPED = 1000
MOST_SKIPPED_TEXT = 100_000
"""Characters: an agent may make a list of what cannot be exported longer than any frame."""


class Files:
    """Access to files as data. `plain` refuses every link and special file on the way and at the end."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self.nofollow = os.O_NOFOLLOW if plain else 0

    def parent(self, path: str, *, create: bool = False) -> tuple[int, str]:
        """Descriptor of the directory that holds `path`, and the last component."""
        parts = [part for part in path.split("/") if part]
        if not path.startswith("/") or not parts or ".." in parts or "." in parts or "\0" in path:
            raise Refused(f"{path!r}: give an absolute path without . or ..")
        directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts[:-1]:
            try:
                if create:
                    self.make_one(directory, part)
                step = os.open(part, os.O_RDONLY | os.O_DIRECTORY | self.nofollow | os.O_CLOEXEC, dir_fd=directory)
            except OSError as error:
                raise Refused(f"{path}: {part}: {error.strerror}") from error
            finally:
                os.close(directory)
            directory = step
        return directory, parts[-1]

    def make_one(self, parent: int, name: str) -> None:
        """A directory that may be there already, in a parent that may be read-only; opening it will tell."""
        with contextlib.suppress(FileExistsError):
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise

    def open_file(self, directory: int, name: str) -> tuple[int, os.stat_result]:
        """A readable descriptor of a regular file; O_NONBLOCK so that a FIFO put there cannot hold us."""
        blocking = os.O_NONBLOCK if self.plain else 0
        fd = os.open(name, os.O_RDONLY | blocking | os.O_NOCTTY | self.nofollow | os.O_CLOEXEC, dir_fd=directory)
        info = os.fstat(fd)
        if self.plain and not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise Refused(f"{name}: not a regular file")
        return fd, info

    def read(self, path: str, limit: int) -> bytes:
        directory, name = self.parent(path)
        try:
            fd, _ = self.open_file(directory, name)
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}", "missing" if error.errno == errno.ENOENT else "input") from error
        finally:
            os.close(directory)
        with open(fd, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise Refused(f"{path}: larger than the limit of {limit} bytes")
        return data

    def write(self, path: str, data: bytes, offset: int, mode: int) -> None:
        """Put `data` at `offset`; offset 0 begins a new file in the place of whatever is there."""
        directory, name = self.parent(path, create=True)
        try:
            if offset == 0 and self.plain:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            begin = (os.O_CREAT | (os.O_EXCL if self.plain else os.O_TRUNC)) if offset == 0 else 0
            fd = os.open(name, os.O_WRONLY | begin | self.nofollow | os.O_CLOEXEC, 0o600, dir_fd=directory)
            with open(fd, "wb") as file:
                file.seek(offset)
                file.write(data)
                os.fchmod(fd, mode & 0o777)
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}") from error
        finally:
            os.close(directory)

    def make_directory(self, path: str) -> None:
        directory, _ = self.parent(path.rstrip("/") + "/x", create=True)
        os.close(directory)


class Export:
    """One walk over declared paths, sent as frames: `entry` headers, then the file's bytes in `data` frames."""

    def __init__(self, control: Control, files: Files, header: Header) -> None:
        self.control = control
        self.files = files
        self.id: int = header["id"]
        self.limit: int = header["limit"]
        self.bytes_left: int = header["limit"]
        self.most: int = header["most"]
        self.entries_left: int = header["most"]
        self.skipped: list[list[str]] = []
        self.skipped_text = 0
        self.skipped_more = 0

    def run(self, paths: list[str]) -> None:
        for path in paths:
            try:
                directory, name = self.files.parent(path)
            except Refused as error:
                self.skip(path, str(error))
                continue
            try:
                self.visit(directory, name, "/" + "/".join(part for part in path.split("/") if part), 0)
            finally:
                os.close(directory)
        end = {"id": self.id, "done": True, "skipped": self.skipped, "skipped_more": self.skipped_more}
        self.control.send(end)

    def skip(self, path: str, why: str) -> None:
        """Written down, as long as there is room."""
        path, why = path[-500:], why[-500:]
        self.skipped_text += len(path) + len(why)
        if len(self.skipped) < MOST_SKIPPED and self.skipped_text <= MOST_SKIPPED_TEXT:
            self.skipped.append([path, why])
        else:
            self.skipped_more += 1

    def visit(self, directory: int, name: str, path: str, depth: int) -> None:
        self.entries_left -= 1
        if self.entries_left < 0:
            raise Refused(f"{path[-500:]}: more than {self.most} files and directories to export", "limit")
        if len(os.fsencode(path)) > MOST_PATH:
            raise Refused(f"{path[-500:]}: longer than {MOST_PATH} bytes", "limit")
        try:
            info = os.stat(name, dir_fd=directory, follow_symlinks=not self.files.plain)
            if stat.S_ISDIR(info.st_mode):
                self.directory(directory, name, path, depth)
            elif stat.S_ISREG(info.st_mode) or not self.files.plain:
                self.file(directory, name, path)
            else:
                self.skip(path, "neither a regular file nor a directory")
        except OSError as error:
            self.skip(path, str(error.strerror))
        except Refused as error:
            if error.kind == "limit":
                raise
            self.skip(path, str(error))

    def directory(self, parent: int, name: str, path: str, depth: int) -> None:
        if depth >= MOST_DEPTH:
            raise Refused(f"{path[-500:]}: deeper than {MOST_DEPTH} directories", "limit")
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | self.files.nofollow | os.O_CLOEXEC, dir_fd=parent)
        try:
            self.control.send({"id": self.id, "entry": "directory", "path": path})
            for child in sorted(os.listdir(fd)):
                self.visit(fd, child, path + "/" + child, depth + 1)
        finally:
            os.close(fd)

    def file(self, directory: int, name: str, path: str) -> None:
        fd, info = self.files.open_file(directory, name)
        with open(fd, "rb") as file:
            if info.st_size > self.bytes_left:
                raise Refused(f"{path[-500:]}: the export is larger than the limit of {self.limit} bytes", "limit")
            mode = stat.S_IMODE(info.st_mode)
            if self.files.plain:
                mode = 0o755 if mode & 0o100 else 0o644
            self.control.send({"id": self.id, "entry": "file", "path": path, "mode": mode})
            left = info.st_size  # what a writer adds meanwhile is not taken
            while left > 0 and (data := file.read(min(CHUNK, left))):
                left -= len(data)
                self.bytes_left -= len(data)
                self.control.send({"id": self.id, "data": True}, data)
