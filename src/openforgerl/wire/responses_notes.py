"""What is noticed while a Responses request is read."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from openforgerl.errors import WireError
from openforgerl.types import JsonValue
from openforgerl.wire.reading import present


class Notes(msgspec.Struct):
    """Warnings and unlisted fields so far; `strict` turns the first unlisted field into a 400."""

    strict: bool = False
    warnings: list[str] = []
    unlisted: list[str] = []

    def warn(self, text: str) -> None:
        """Record something that was left out or mended."""
        self.warnings.append(text)

    def check(self, given: dict[str, JsonValue], listed: Collection[str], where: str, path: str) -> None:
        """Note fields of `given` that are not listed; null is absent. `where` is the path with indices left open."""
        for name in given:
            if name in listed or not present(given, name):
                continue
            if self.strict:
                raise WireError(400, "unlisted_field", f"{path}.{name}: unknown field", param=f"{path}.{name}")
            self.unlisted.append(f"{where}.{name}")
