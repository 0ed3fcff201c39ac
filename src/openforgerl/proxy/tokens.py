"""The control token's file."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from pathlib import Path

from openforgerl.errors import ConfigError

logger = logging.getLogger(__name__)

SHORTEST = 16
"""Fewest characters of a token that somebody chose."""


def control_token(path: Path) -> str:
    """The token in `path`; a new random one, written with mode 0600, when there is no such file.

    ConfigError when the file cannot be used. The token itself is logged nowhere.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & 0o077:
            logger.warning("control token file %s can be read by others; chmod 600 it", path)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"proxy.control_token_file {path} cannot be used: {error}") from error
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"proxy.control_token_file {path} must hold one token of at least {SHORTEST} printable characters; "
            "delete the file to have one made"
        )
    return token


def _make(path: Path) -> None:
    """A new token in `path`, unless another process makes one first. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # unlike a rename, it never replaces the token that somebody else reads by now
    finally:
        os.unlink(partial)
