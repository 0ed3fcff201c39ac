"""What is noticed while a request is read, in every dialect: one rule for fields that nobody listed.

An unlisted field is recorded under its path with the indices left open, so that it counts once however often it
stands there; `strict` refuses the first. One whose value is null is absent (DESIGN §5), and so is never unlisted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import JsonValue, Message


class Noted(msgspec.Struct, frozen=True):
    """What was read from a part of a request, and what was noticed on the way."""

    messages: tuple[Message, ...]
    warnings: tuple[str, ...]
    unlisted: tuple[str, ...]
    images: Mapping[str, bytes]
    state: Any = None
    """What a reader knew behind it, where later parts depend on earlier ones."""


class Notes:
    """Warnings, unlisted fields and images of one request so far."""

    def __init__(self, *, strict: bool = False, warnings: Iterable[str] = ()) -> None:
        """`strict`: an unlisted field is a 400. `warnings`: what was noticed before."""
        self.strict = strict
        self._warnings = dict.fromkeys(warnings)
        self._unlisted: dict[str, None] = {}
        self.images: dict[str, bytes] = {}
        """The bytes of every image met on the way, by sha256 hex."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out or mended, each once, in order."""
        return tuple(self._warnings)

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Paths of unlisted fields, each once, in order."""
        return tuple(self._unlisted)

    def aside(self) -> Notes:
        """Notes on a part of the same request, to be `taken` afterwards."""
        return Notes(strict=self.strict)

    def noted(self, messages: Iterable[Message], state: Any = None) -> Noted:
        """All that these notes hold, with the messages that were read."""
        return Noted(tuple(messages), self.warnings, self.unlisted, self.images, state)

    def take(self, noted: Noted) -> None:
        """Add what was noticed aside."""
        self._warnings.update(dict.fromkeys(noted.warnings))
        self._unlisted.update(dict.fromkeys(noted.unlisted))
        self.images.update(noted.images)

    def warn(self, text: str) -> None:
        """Record something that was left out or mended."""
        self._warnings[text] = None

    def check(self, given: Mapping[str, JsonValue], listed: Collection[str], where: str = "", path: str = "") -> None:
        """Note the fields of the object at `path` that are not `listed`; the body itself is at "".

        `where`: the path with its indices left open. WireError 400 `unlisted_field` under `strict`.
        """
        for name, value in given.items():
            if name in listed or value is None:
                continue
            if self.strict:
                full = f"{path}.{name}" if path else name
                raise WireError(400, "unlisted_field", f"{full}: unknown field", param=full)
            self._unlisted[f"{where}.{name}" if where else name] = None
