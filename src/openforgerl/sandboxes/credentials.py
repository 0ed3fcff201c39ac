"""The credentials by which a dialled init is known: one for each connection, each dead once the next is taken.

The first stands in the environment that the sandbox was made with; every later one is said over the connection before
it and is nowhere but in init's memory. All are derived from a key, so that a restarted process knows those of the
sandboxes that it finds without having written one down.
"""

from __future__ import annotations

import hashlib
import hmac
import re

_TOKEN = re.compile(r"(?P<number>0|[1-9][0-9]{0,8})\.[0-9a-f]{64}")


class Credentials:
    """Those of one sandbox. A token is its number in the row, a point, and a MAC in hexadecimal."""

    def __init__(self, key: bytes, name: str, nonce: str, *, first: int = 0) -> None:
        """`first`: the lowest number that is still good; 1 for a sandbox whose init was handed a second one."""
        self._key = key
        self._words = f"{name}\n{nonce}\n"
        self._lowest = first

    def token(self, number: int = 0) -> str:
        """The credential of that number; by default the one that goes into the environment."""
        mac = hmac.new(self._key, f"{self._words}{number}".encode(), hashlib.sha256)
        return f"{number}.{mac.hexdigest()}"

    def admits(self, token: str) -> bool:
        """Whether this is one that is good. Its use kills those before it."""
        found = _TOKEN.fullmatch(token)
        if found is None:
            return False
        number = int(found["number"])
        if number < self._lowest or not hmac.compare_digest(token, self.token(number)):
            return False
        self._lowest = number
        return True

    def continues(self, before: Credentials) -> bool:
        """Whether `before` are the same sandbox's; if so, what is dead there is dead here."""
        if (before._key, before._words) != (self._key, self._words):
            return False
        self._lowest = max(self._lowest, before._lowest)
        return True

    def following(self) -> tuple[int, str]:
        """Number and credential for the connection after this one.

        The one in use stays good until `taken`, or until its successor is used: init may not have got that.
        """
        return self._lowest + 1, self.token(self._lowest + 1)

    def taken(self, number: int) -> None:
        """Init has said that it holds that one."""
        self._lowest = max(self._lowest, number)
