"""A task directory as content: every regular file of it, and the digest that identifies a task."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from openforgerl.errors import TaskError

MAX_FILES = 20_000
MAX_FILE_BYTES = 256 * 2**20
MAX_TOTAL_BYTES = 2**30


def files_of(directory: Path) -> list[str]:
    """Relative paths of all files below, sorted. Raises `TaskError` on links, special files and oversize.

    Links are refused because a task must mean the same wherever it is copied, and must not reach outside.
    """
    found: list[str] = []
    total = 0
    for relative, size in _walk(directory, ""):
        found.append(relative)
        total += size
        if len(found) > MAX_FILES:
            raise TaskError(f"{directory} has more than {MAX_FILES} files; a task that big needs an image")
        if size > MAX_FILE_BYTES:
            raise TaskError(f"{directory / relative} has {size} bytes; at most {MAX_FILE_BYTES} are accepted")
        if total > MAX_TOTAL_BYTES:
            raise TaskError(f"{directory} has more than {MAX_TOTAL_BYTES} bytes; a task that big needs an image")
    return sorted(found)


def digest_of(directory: Path) -> str:
    """sha256 hex over the sorted (path, executable or not, sha256 of the bytes) of all files below."""
    total = hashlib.sha256()
    for relative in files_of(directory):
        path = directory / relative
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        mode = "x" if is_executable(path) else "-"
        total.update(f"{digest} {mode} {relative}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def is_executable(path: Path) -> bool:
    """The one mode bit that matters: may its owner run it."""
    return bool(path.stat().st_mode & stat.S_IXUSR)


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(directory / entry.name, relative + "/")
            elif entry.is_symlink():
                raise TaskError(f"{entry.path} is a symbolic link; put the file itself into the task")
            elif entry.is_file(follow_symlinks=False):
                yield relative, entry.stat(follow_symlinks=False).st_size
            else:
                raise TaskError(f"{entry.path} is no regular file; remove it from the task")
