"""Opening the writer of a format by name, without importing the libraries of the others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openforgerl import plugins
from openforgerl.errors import ConfigError
from openforgerl.formats.records import Decode, Writer


def format_names() -> list[str]:
    """Every format that can be written."""
    return plugins.names("format")


@contextmanager
def open_writer(name: str, out: Path, decode: Decode | None = None) -> Generator[Writer]:
    """A writer of format `name` to `out`; an error inside removes what was written.

    `decode` fills the text columns that some trainers show to people; without it they are empty and counted as
    lost. Raises ConfigError for an unknown format or a missing library, InputError when `out` exists.
    """
    try:
        kind: Any = plugins.load("format", name)
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ConfigError(f"{error}; install the extra: pip install 'openforgerl[export]'") from error
        raise
    writer: Writer = kind(out, decode)
    try:
        yield writer
    except BaseException:
        writer.abandon()
        raise
