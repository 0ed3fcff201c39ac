"""Progress for people: bars on a terminal, plain lines elsewhere. Implements `protocols.Progress`."""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from openforgerl import protocols

LINE_EVERY_S = 10.0
"""Seconds between two plain lines of one stage, so that a log stays readable."""


PIPE_WIDTH = 160
"""Columns of tables that no terminal shows."""


def plain(line: str) -> str:
    """Text that cannot move a terminal's cursor or change its state: what agents write is hostile.

    A control character becomes its picture (ESC is ␛), what has none becomes "?"; newlines and tabs stay.
    """
    return "".join(char if char.isprintable() else _picture(char) for char in line)


def cell(words: str) -> Text:
    """A table's cell that shows `words` as they are: rich reads a bare string as markup and fails on `[/x]`."""
    return Text(plain(words))


def _picture(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) == "Zs":
        return char
    return chr(0x2400 + ord(char)) if char < " " else "␡" if char == "\x7f" else "?"


class BarProgress:
    """Live bars on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def start(self, stage: str, total: int, *, done: int = 0) -> None:
        if stage in self._tasks:
            self._progress.update(self._tasks[stage], total=total, completed=done)
            return
        self._tasks[stage] = self._progress.add_task(stage, total=total, completed=done, note="")

    def advance(self, stage: str, amount: int = 1, *, note: str | None = None) -> None:
        task = self._tasks[stage]
        self._progress.update(task, advance=amount)
        if note is not None:
            self._progress.update(task, note=note)

    def finish(self, stage: str, *, note: str = "") -> None:
        task = self._tasks[stage]
        self._progress.update(task, completed=self._progress.tasks[task].total or 0, note=note)
        self._progress.stop_task(task)

    def say(self, line: str) -> None:
        self._progress.console.print(plain(line), highlight=False, markup=False)


class LineProgress:
    """A line when a stage starts, every few seconds while it runs, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stages: dict[str, _Stage] = {}

    def start(self, stage: str, total: int, *, done: int = 0) -> None:
        self._stages[stage] = _Stage(total, done)
        self.say(f"{stage}: {done}/{total}" if done else f"{stage}: {total} to do")

    def advance(self, stage: str, amount: int = 1, *, note: str | None = None) -> None:
        state = self._stages[stage]
        state.done += amount
        state.note = state.note if note is None else note
        now = time.monotonic()
        if now - state.printed >= LINE_EVERY_S:
            state.printed = now
            self.say(f"{stage}: {state.done}/{state.total}{state.left(now)} {state.note}".rstrip())

    def finish(self, stage: str, *, note: str = "") -> None:
        seconds = time.monotonic() - self._stages[stage].started
        self.say(f"{stage}: done in {seconds:.0f} s {note}".rstrip())

    def say(self, line: str) -> None:
        print(plain(line), file=self._stream, flush=True)


class _Stage:
    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.done = done
        self.first = done
        self.started = self.printed = time.monotonic()
        self.note = ""

    def left(self, now: float) -> str:
        """Remaining time at the pace since the start of this process, or nothing when unknown."""
        fresh = self.done - self.first
        if fresh <= 0 or self.total <= self.done:
            return ""
        seconds = (now - self.started) / fresh * (self.total - self.done)
        return f", about {seconds:.0f} s left"


def open_console() -> Console:
    """Standard output for tables. A pipe or file has no width of its own, so ids there stay in one piece to copy."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=wide)


@contextmanager
def open_progress(stream: TextIO) -> Generator[protocols.Progress]:
    """Bars when `stream` is a terminal, lines when it is not."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield LineProgress(stream)
        return
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield BarProgress(progress)
