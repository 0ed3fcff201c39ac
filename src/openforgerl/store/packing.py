"""Numbers as blobs: token ids in two or four bytes each, log-probs as the very doubles they were."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from copy import copy

from openforgerl.errors import StoreError

_SMALL = b"H"
_LARGE = b"I"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as a type letter and little-endian items: two bytes each when all fit, else four.

    Raises StoreError for an id outside [0, 2**32).
    """
    letter = _letter(ids)
    return letter + _items(letter, ids)


def _letter(ids: Sequence[int]) -> bytes:
    if not ids:
        return b""
    return _SMALL if max(ids) < 1 << 16 else _LARGE


def _items(letter: bytes, ids: Sequence[int]) -> bytes:
    try:
        return _little_endian(array("H" if letter == _SMALL else "I", ids))
    except OverflowError as error:
        raise StoreError("token ids must be 0 or more and below 2**32") from error


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """The ids that `pack_ids` packed; StoreError when the blob is damaged."""
    if not blob:
        return ()
    letter, data = blob[:1], blob[1:]
    if letter not in (_SMALL, _LARGE):
        raise StoreError(f"damaged token ids: unknown item type {letter!r}")
    items: array[int] = array("H" if letter == _SMALL else "I")
    if len(data) % items.itemsize:
        raise StoreError(f"damaged token ids: {len(data)} bytes are not a whole number of items")
    items.frombytes(data)
    if sys.byteorder == "big":
        items.byteswap()
    return tuple(items)


def pack_floats(values: Sequence[float] | None) -> bytes | None:
    """Doubles, little-endian, bit for bit; None stays None."""
    return None if values is None else _little_endian(array("d", values))


def unpack_floats(blob: bytes | None) -> tuple[float, ...] | None:
    """The doubles that `pack_floats` packed; StoreError when the blob is damaged."""
    if blob is None:
        return None
    items: array[float] = array("d")
    if len(blob) % items.itemsize:
        raise StoreError(f"damaged log-probs: {len(blob)} bytes are not a whole number of doubles")
    items.frombytes(blob)
    if sys.byteorder == "big":
        items.byteswap()
    return tuple(items)


class IdsDigest:
    """sha256 over ids as stored, which can go on with more of them: equal digests mean equal ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._letter = _letter(ids)
        self._state = hashlib.sha256(self._letter)
        self._state.update(_items(self._letter, ids))
        self.length = len(ids)

    def with_more(self, ids: tuple[int, ...]) -> IdsDigest:
        """The digest of `ids`, of which the first `length` are these."""
        more = ids[self.length :]
        if not self._letter or (self._letter == _SMALL and _letter(more) == _LARGE):
            return IdsDigest(ids)
        longer = copy(self)
        longer._state = self._state.copy()
        longer._state.update(_items(self._letter, more))
        longer.length = len(ids)
        return longer

    @property
    def value(self) -> bytes:
        """The digest."""
        return self._state.digest()


def digest_ids(ids: Sequence[int]) -> bytes:
    """sha256 over the ids as stored: equal digests mean equal ids."""
    return IdsDigest(ids).value


def digest_blobs(*blobs: bytes | None) -> bytes:
    """sha256 over blobs in order, each with its length, None told apart from empty."""
    digest = hashlib.sha256()
    for blob in blobs:
        digest.update(b"-" if blob is None else b"%d:" % len(blob))
        digest.update(blob or b"")
    return digest.digest()


def common_prefix(left: tuple[object, ...], right: tuple[object, ...]) -> int:
    """How many leading items are equal. Bisects on slices, which compare at C speed."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _little_endian(items: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        items = items[:]
        items.byteswap()
    return items.tobytes()
