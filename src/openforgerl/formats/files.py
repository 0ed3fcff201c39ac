"""Output that is whole or absent: written beside its place, renamed at the end."""

from __future__ import annotations

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
        self.path = out.with_name(f".partial-{out.name}")
        self.remove()
        if folder:
            self.path.mkdir()

    def finish(self) -> None:
        """Give it its name."""
        self.path.rename(self._out)

    def remove(self) -> None:
        """Remove what is unfinished, if anything is."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


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
        self._file.close()
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
