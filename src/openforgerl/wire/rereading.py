"""A history that comes again, read once: what a session's earlier bodies held, item by item.

Items are told apart by the sha256 of their own bytes, so one that comes again in the same bytes is the same object as
before, and what was read from it needs not be read again. A pure saving: without it every request reads the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from openforgerl.conversation import Beginnings
from openforgerl.types import JsonValue, Message
from openforgerl.wire.notes import Noted, Notes

LISTS = ("messages", "input", "contents", "system", "tools")
"""Fields that hold what comes again, in one dialect or another."""

MOST_BYTES = 8 * 2**20
MOST_ITEMS = 20_000
"""A larger body, or one of more items, is read as if it were the first, and nothing of it is held: an agent chooses
what it sends, and shares the proxy with others."""

_BODIES = 4
"""How many bodies' items are held: a session may carry a few conversations at once."""

ReadOne = Callable[[int, JsonValue, Notes], list[Message]]
"""Messages of the item at an index of the history."""


class _Body(msgspec.Struct, frozen=True):
    """The items of one body by digest, and what tells that an object is one of them."""

    items: dict[bytes, JsonValue]
    ids: frozenset[int]


class Rereading:
    """What one session's earlier requests held."""

    def __init__(self) -> None:
        self._bodies: tuple[_Body, ...] = ()
        self._read: dict[tuple[str, bool], Beginnings[JsonValue, Noted | None]] = {}

    def decode(self, body: bytes) -> tuple[JsonValue, JsonValue, dict[bytes, JsonValue]]:
        """The value of `body`; the same without those items of histories that an earlier body held; all items.

        Raises ValueError (msgspec.DecodeError is one) and RecursionError where decoding the whole would raise, in other
        words.
        """
        if len(body) > MOST_BYTES:
            value = msgspec.json.decode(body)
            return value, value, {}
        body.decode()  # what is skipped below is not looked at so closely
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        value: dict[str, JsonValue] = {}
        new: dict[str, JsonValue] = {}
        held: dict[bytes, JsonValue] = {}
        for name, raw in fields.items():
            if name in LISTS and bytes(raw).startswith(b"["):
                value[name], new[name] = self._items(raw, held)
            else:
                value[name] = new[name] = msgspec.json.decode(raw)
        return value, new, held

    def keep(self, items: dict[bytes, JsonValue]) -> None:
        """Hold the items of a body that is taken."""
        if items:
            others = [body for body in self._bodies if not body.items.keys() <= items.keys()]
            self._bodies = (*others[1 - _BODIES :], _Body(items, frozenset(map(id, items.values()))))

    def clear(self) -> None:
        """Forget all."""
        self._bodies = ()
        self._read.clear()

    def messages(self, given: Sequence[JsonValue], dialect: str, notes: Notes, read_one: ReadOne) -> list[Message]:
        """The messages of a history, the same objects for items that came before in the same place.

        An item that was worth a warning is read every time: the warning may be about what was not yet known.
        """
        read = self._read.setdefault((dialect, notes.strict), Beginnings(_BODIES))
        found: list[Noted | None] = read.known(given)
        messages: list[Message] = []
        for at, item in enumerate(given):
            noted = found[at] if at < len(found) else None
            if noted is None:
                aside = notes.aside()
                noted = aside.noted(read_one(at, item, aside))
                kept = None if noted.warnings else noted
                if at < len(found):
                    found[at] = kept
                else:
                    found.append(kept)
            if noted.warnings or noted.unlisted or noted.images:
                notes.take(noted)
            messages += noted.messages
        if self._holds(given):
            read.keep(given, found)
        return messages

    def passages(self, given: Sequence[JsonValue], dialect: str, notes: Notes, messages: list[Message]) -> Passages:
        """As `messages`, for dialects in which several items make a message. `messages`: what they are added to."""
        read = self._read.setdefault((dialect, notes.strict), Beginnings[JsonValue, Noted | None](_BODIES))
        return Passages(read if self._holds(given) else Beginnings(0), given, notes, messages)

    def _items(self, raw: msgspec.Raw, held: dict[bytes, JsonValue]) -> tuple[list[JsonValue], list[JsonValue]]:
        pieces = msgspec.json.decode(raw, type=list[msgspec.Raw])
        if len(held) + len(pieces) > MOST_ITEMS:
            whole = msgspec.json.decode(raw)
            return whole, whole
        items: list[JsonValue] = []
        new: list[JsonValue] = []
        for piece in pieces:
            digest = hashlib.sha256(piece).digest()
            item = held.get(digest, self._held(digest))
            if item is _NOT_HELD:
                item = msgspec.json.decode(piece)
                new.append(item)
            held[digest] = item
            items.append(item)
        return items, new

    def _held(self, digest: bytes) -> JsonValue:
        for body in reversed(self._bodies):
            if digest in body.items:
                return body.items[digest]
        return _NOT_HELD

    def _holds(self, given: Sequence[JsonValue]) -> bool:
        """Whether the items of a history are held: all are, or none."""
        return any(id(given[0]) in body.ids and id(given[-1]) in body.ids for body in self._bodies) if given else False


_NOT_HELD = object()


class Passages:
    """One reading of a history whose items make messages together: what an earlier reading came to, and from where on
    it must be read. A passage ends behind an item with which nothing is left open.
    """

    def __init__(
        self,
        read: Beginnings[JsonValue, Noted | None],
        given: Sequence[JsonValue],
        notes: Notes,
        messages: list[Message],
    ) -> None:
        known = read.known(given)
        self.start = max((at + 1 for at, passage in enumerate(known) if passage is not None), default=0)
        """The first item that must be read."""
        self.state: Any = None
        """What the reader knew there."""
        self.notes = notes.aside()
        """For the passage that is being read."""
        self._read, self._given, self._outer, self._messages = read, given, notes, messages
        self._passages = known[: self.start]
        for passage in self._passages:
            if passage is not None:
                notes.take(passage)
                messages += passage.messages
                self.state = passage.state
        self._begun = len(messages)

    def item_read(self, *, ended: bool, state: Any = None) -> None:
        """One more item was read. `ended`: whether the passage may end here.

        It does not behind a warning, which may be about what was not yet known.
        """
        if not ended or self.notes.warnings:
            self._passages.append(None)
            return
        passage = self.notes.noted(self._messages[self._begun :], state)
        self._passages.append(passage)
        self._begun = len(self._messages)
        self._outer.take(passage)
        self.notes = self._outer.aside()

    def end(self) -> None:
        """All was read."""
        self._outer.take(self.notes.noted(()))
        self._read.keep(self._given, self._passages)
