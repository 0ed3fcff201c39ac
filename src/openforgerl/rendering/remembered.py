"""A memory of pure answers, bounded by how much it holds, not by how many: one text may be as long as a thousand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """The answers used last, of at most `limit` bytes together. Prompts are rendered in threads, so it is locked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Bytes held, as `put` was told."""
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        """The answer, or None when it is not held."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Hold an answer of so many bytes; the ones unused longest go. One above the limit is not held at all."""
        with self._lock:
            old = self._held.pop(key, None)
            self.size -= old[1] if old is not None else 0
            if size > self.limit:
                return
            self._held[key] = value, size
            self.size += size
            while self.size > self.limit:
                _, (_, gone) = self._held.popitem(last=False)
                self.size -= gone

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
            self.size = 0
