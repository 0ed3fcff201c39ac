"""Reading one table of a TOML file while keeping account of what was odd."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One oddity of a task. An `error` makes the task unreadable, a `warning` does not."""

    level: Literal["error", "warning"]
    where: str
    """Dotted key, or a path inside the task directory."""
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message}"


class Findings:
    """Findings in the order of discovery."""

    def __init__(self) -> None:
        self._list: list[Finding] = []

    def error(self, where: str, message: str) -> None:
        self._list.append(Finding(level="error", where=where, message=message))

    def warning(self, where: str, message: str) -> None:
        self._list.append(Finding(level="warning", where=where, message=message))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._list)


class Section:
    """One table. Every key that nobody asked for by `done()` is reported, with the nearest known name."""

    def __init__(self, name: str, table: dict[str, Any], findings: Findings) -> None:
        self.name = name
        self._table = table
        self._findings = findings
        self._known: list[str] = []
        self._seen: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the table has `key`."""
        return key in self._table

    def take(self, key: str, *, legacy: tuple[str, ...] = ()) -> Any:
        """The value of `key`, or of its legacy spelling (reported), or None."""
        self._known.append(key)
        self._seen.update((key, *legacy))
        for old in legacy:
            if old in self._table:
                self._findings.warning(self._path(old), f"is a legacy spelling; write {key}")
        for name in (key, *legacy):
            if name in self._table:
                return self._table[name]
        return None

    def text(self, key: str) -> str | None:
        """A string, or None."""
        value = self.take(key)
        if value is None or isinstance(value, str):
            return value
        self._findings.error(self._path(key), f"must be a string; got {value!r}")
        return None

    def number(self, key: str, *, legacy: tuple[str, ...] = ()) -> float | None:
        """A finite number, or None."""
        value = self.take(key, legacy=legacy)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self._findings.error(self._path(key), f"must be a finite number; got {value!r}")
        return None

    def table(self, key: str) -> dict[str, Any]:
        """A table, empty when absent."""
        value = self.take(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self._findings.error(self._path(key), f"must be a table; got {value!r}")
        return {}

    def section(self, key: str) -> Section:
        """A table as a section of its own."""
        return Section(self._path(key), self.table(key), self._findings)

    def known(self, *keys: str) -> None:
        """Keys that mean something to Harbor and nothing to us."""
        self._known += keys
        self._seen.update(keys)

    def done(self) -> None:
        """Report what is left."""
        for key in self._table:
            if key not in self._seen:
                close = difflib.get_close_matches(key, self._known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                self._findings.warning(self._path(key), f"is unknown and ignored{hint}")

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
