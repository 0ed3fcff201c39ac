"""One digest for a whole directory tree: how "this is the package as published" is checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from openforgerl.errors import InputError


def digest_tree(directory: Path, *, leave_out: frozenset[str] = frozenset()) -> str:
    """sha256 hex over the sorted lines `<sha256 or link target>  <relative path>` of everything below.

    `leave_out` names relative paths that are not part of the content. Modes and times do not count. Raises
    `InputError` when the tree holds anything but directories, regular files and symbolic links.
    """
    return digest_marks(marks_of(directory), leave_out=leave_out)


def marks_of(directory: Path) -> dict[str, str]:
    """Relative path → sha256 hex, or link target, of everything below; read once, digested in parts."""
    return {path: _mark(directory / path) for path in _walk(directory, "")}


def digest_marks(marks: Mapping[str, str], *, below: str = "", leave_out: frozenset[str] = frozenset()) -> str:
    """What `digest_tree` gives for the subdirectory `below` of the tree that was read."""
    prefix = f"{below}/" if below else ""
    total = hashlib.sha256()
    for path in sorted(marks):
        if path.startswith(prefix) and path not in leave_out:
            total.update(f"{marks[path]}  {path.removeprefix(prefix)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def digest_file(path: Path) -> str:
    """sha256 hex of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mark(path: Path) -> str:
    if path.is_symlink():
        return f"link:{path.readlink()}"
    if not path.is_file():
        raise InputError(f"{path} is neither a file, a directory nor a link; remove it and install again")
    return digest_file(path)


def _walk(directory: Path, prefix: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(directory / entry.name, f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}"
