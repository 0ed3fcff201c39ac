"""Output that is whole or absent: written beside its place, renamed at the end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from openforgerl.errors import InputError


class PartialOutput:
    """A file or folder that gets its name only when it is finished."""

    def __init__(self, out: Path, *, folder: bool = False) -> None:
        """Raises InputError when something is at `out` already: an export never replaces what may be used."""
        if out.exists():
            raise InputError(f"{out} exists already; name another --out, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out = out
        # Its own name: two exports to one place do not write into one another.
        self.path = out.with_name(f".partial-{os.getpid()}-{os.urandom(4).hex()}-{out.name}")
        if folder:
            self.path.mkdir()

    def finish(self) -> None:
        """Give it its name. Raises InputError, having removed it, when something else has that name by now."""
        try:
            if self.path.is_dir():
                self._out.mkdir()  # refuses what exists; a rename puts the folder in place of an empty one
                self.path.rename(self._out)
            else:
                _link(self.path, self._out)
        except FileExistsError as error:
            self.remove()
            raise InputError(f"{self._out} was made by somebody else meanwhile; name another --out") from error

    def remove(self) -> None:
        """Remove what is unfinished, if anything is."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Rename, unless `target` exists: a rename would replace it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV):
            raise
        if target.exists():  # a file system without links
            raise FileExistsError(errno.EEXIST, "it exists", str(target)) from error
        source.rename(target)
    else:
        source.unlink()


class LineFile:
    """A file of JSON lines."""

    def __init__(self, out: Path) -> None:
        self._partial = PartialOutput(out)
        self._file: BinaryIO = self._partial.path.open("wb")

    def write(self, line: bytes) -> None:
        """One line, without its end."""
        self._file.write(line)
        self._file.write(b"\n")

    def finish(self) -> None:
        """Close it and give it its name."""
        self._file.close()
        self._partial.finish()

    def remove(self) -> None:
        """Close it and remove it, unless it is finished."""
        try:
            self._file.close()  # may have to write what a full disk has no room for
        finally:
            self._partial.remove()


def json_lines(path: Path, take: Callable[[bytes], None]) -> None:
    """Hand every non-empty line of `path` to `take`. Its ValueErrors become InputErrors naming file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                take(line)
            except ValueError as error:
                raise InputError(f"{path}:{number}: {error}") from error
            except RecursionError as error:
                raise InputError(f"{path}:{number}: lists and objects lie too deep in one another") from error
