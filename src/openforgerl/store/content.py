"""JSON values stored by content, so that disk grows with what is new.

A conversation is sent whole with every turn, in the request and in its canonical form. Three rules make the
stored size follow what is new: a string of `LONG_STRING` characters or more is stored once and referred to;
a list with structure in it is a chain of nodes (previous node, item), so a list that extends another shares
all of the other's nodes; everything else is written out. References are objects with one key that starts
with NUL; an object of the caller's that has such a key is written as a list of pairs instead.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from openforgerl.conversation import Beginnings
from openforgerl.errors import StoreError
from openforgerl.types import JsonValue

LONG_STRING = 128
"""Shorter strings cost less written out than as a reference."""

MOST_NEW = 8 * 2**20
"""Bytes of new items of a list that is remembered: one that has more does not go on from another, so the next one will
not either, and would only be held."""

_STRING = "\x00s"
_CHAIN = "\x00c"
_PAIRS = "\x00d"
_STRUCTURES = (dict, list, tuple, msgspec.Struct)


class Written(msgspec.Struct, frozen=True):
    """A value and how it was written."""

    value: Any
    skeleton: JsonValue


class WriterConnection(sqlite3.Connection):
    """A connection that remembers which list items and nodes it has stored.

    Whoever rolls back on it must `forget`, because ids given out since then are void.
    """

    MOST = 200_000
    MOST_KEPT = 64
    MOST_SESSIONS = 256
    LISTS = 8
    """Lists of a session that the next call may go on from: its histories and tools, as received and as understood."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._items: dict[bytes, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._written: OrderedDict[str, Mapping[str, Written]] = OrderedDict()
        self._lists: OrderedDict[str, Beginnings[Any, int]] = OrderedDict()

    def keep(self, name: str, fields: Mapping[str, Written]) -> None:
        """Remember fields of something that will be written again with the same ones; the last `MOST_KEPT` stay."""
        self._written[name] = fields
        if len(self._written) > self.MOST_KEPT:
            self._written.popitem(last=False)

    def take(self, name: str) -> Mapping[str, Written]:
        """What was kept under that name, and no longer is."""
        return self._written.pop(name, {})

    def lists(self, session_id: str) -> Beginnings[Any, int]:
        """The chain nodes of lists that this session's calls held."""
        found = self._lists.setdefault(session_id, Beginnings(self.LISTS))
        self._lists.move_to_end(session_id)
        if len(self._lists) > self.MOST_SESSIONS:
            self._lists.popitem(last=False)
        return found

    def drop_lists(self, session_id: str) -> None:
        """No more calls of this session come."""
        self._lists.pop(session_id, None)

    @property
    def items(self) -> dict[bytes, int]:
        """sha256 of an item's JSON → its content id."""
        return self._items

    @property
    def nodes(self) -> dict[tuple[int, int], int]:
        """(previous node, item) → node."""
        return self._nodes

    def forget(self) -> None:
        """Start remembering anew."""
        self._items.clear()
        self._nodes.clear()
        self._written.clear()
        self._lists.clear()


class ContentWriter:
    """Puts JSON values into the tables of one open transaction."""

    def __init__(self, connection: WriterConnection) -> None:
        self._connection = connection
        if len(connection.items) + len(connection.nodes) > connection.MOST:
            connection.forget()

    def encode(self, value: JsonValue) -> bytes:
        """`value` as JSON bytes in which what is long or shared is a reference.

        Raises StoreError when it is not a JSON value (NaN, an object with keys that are no strings, ...).
        """
        return msgspec.json.encode(self.skeleton(value))

    def skeleton(self, value: JsonValue) -> JsonValue:
        """What `encode` writes, as a value. StoreError as there."""
        return self._checked(lambda: self._skeleton(value))

    def fields(self, fields: Mapping[Any, Any], lists: Beginnings[Any, int]) -> JsonValue:
        """The skeleton of an object. Its lists may be long, and hold structs of ours: of one that begins with the very
        same items as one of `lists`, only the others are looked at. StoreError as `encode`.
        """
        if not all(isinstance(name, str) and not name.startswith("\x00") for name in fields):
            return self.skeleton(dict(fields))
        return self._checked(
            lambda: {
                name: {_CHAIN: self._chain(item, lists)} if _is_structured(item) else self._skeleton(item)
                for name, item in fields.items()
            }
        )

    def _checked(self, make: Callable[[], JsonValue]) -> JsonValue:
        try:
            skeleton = make()
            msgspec.json.encode(skeleton)
            return skeleton
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"not a JSON value that can be stored: {error}") from error

    def _skeleton(self, value: Any) -> Any:
        if isinstance(value, str):
            return {_STRING: self._content(value.encode())} if len(value) >= LONG_STRING else value
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise TypeError("an object has a key that is no string")
            items: dict[str, Any] = {key: self._skeleton(item) for key, item in value.items()}
            if any(key.startswith("\x00") for key in items):
                return {_PAIRS: [[key, item] for key, item in items.items()]}
            return items
        if isinstance(value, list | tuple):
            if not _is_structured(value):
                return [self._skeleton(item) for item in value]
            return {_CHAIN: self._chain(value, Beginnings(0))}
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float) and value - value == 0:  # finite: NaN and infinity are no JSON
            return value
        raise TypeError(f"{value!r} is not JSON")

    def _chain(self, value: Sequence[Any], lists: Beginnings[Any, int]) -> int:
        """The last node of a list."""
        nodes = lists.known(value)
        size = 0
        for item in value[len(nodes) :]:
            data = msgspec.json.encode(item)
            size += len(data)
            nodes.append(self._node(nodes[-1] if nodes else 0, self._item(item, data)))
        if size <= MOST_NEW:
            lists.keep(value, nodes)
        return nodes[-1]

    def _item(self, item: Any, data: bytes) -> int:
        known = hashlib.sha256(data).digest()
        found = self._connection.items.get(known)
        if found is None:
            plain = msgspec.to_builtins(item) if isinstance(item, msgspec.Struct) else item
            found = self._content(msgspec.json.encode(self._skeleton(plain)))
            self._connection.items[known] = found
        return found

    def _content(self, data: bytes) -> int:
        digest = hashlib.sha256(data).digest()
        found = self._connection.execute("SELECT id FROM content WHERE digest = ?", (digest,)).fetchone()
        if found:
            return found[0]
        insert = "INSERT INTO content (digest, data) VALUES (?, ?) RETURNING id"
        return self._connection.execute(insert, (digest, data)).fetchone()[0]

    def _node(self, prev: int, item: int) -> int:
        node = self._connection.nodes.get((prev, item))
        if node is None:
            found = self._connection.execute(
                "SELECT id FROM chain WHERE prev = ? AND item = ?", (prev, item)
            ).fetchone()
            if found is None:
                insert = "INSERT INTO chain (prev, item) VALUES (?, ?) RETURNING id"
                found = self._connection.execute(insert, (prev, item)).fetchone()
            node = self._connection.nodes[prev, item] = int(found[0])
        return node


def _is_structured(value: Any) -> bool:
    """Whether it is a list with something in it that is no scalar."""
    return isinstance(value, list | tuple) and any(isinstance(item, _STRUCTURES) for item in value)


class ContentReader:
    """Reads values back; remembers what it has read, so a session's calls cost what is new in each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._strings: dict[int, str] = {}
        self._items: dict[int, bytes] = {}
        self._chains: dict[int, tuple[int, int]] = {}

    def decode(self, data: bytes) -> JsonValue:
        """The value that `ContentWriter.encode` was given. StoreError when anything is missing or damaged."""
        try:
            return self._value(msgspec.json.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"damaged stored JSON: {error}") from error

    def _value(self, skeleton: Any) -> Any:
        if isinstance(skeleton, list):
            return [self._value(item) for item in skeleton]
        if not isinstance(skeleton, dict):
            return skeleton
        if len(skeleton) == 1:
            key, inner = next(iter(skeleton.items()))
            if key == _STRING:
                return self._string(inner)
            if key == _CHAIN:
                return self._list(inner)
            if key == _PAIRS:
                return {key: self._value(item) for key, item in inner}
        return {key: self._value(item) for key, item in skeleton.items()}

    def _string(self, content: int) -> str:
        if content not in self._strings:
            self._strings[content] = self._data(content).decode()
        return self._strings[content]

    def _list(self, node: int) -> list[Any]:
        items: list[int] = []
        while node:
            if node not in self._chains:
                found = self._connection.execute("SELECT prev, item FROM chain WHERE id = ?", (node,)).fetchone()
                if found is None:
                    raise StoreError(f"damaged run database: list node {node} is missing")
                self._chains[node] = found
            prev, item = self._chains[node]
            if prev >= node:
                raise StoreError(f"damaged run database: list node {node} follows node {prev}")
            items.append(item)
            node = prev
        values: list[Any] = []
        for item in reversed(items):
            if item not in self._items:
                self._items[item] = self._data(item)
            values.append(self._value(msgspec.json.decode(self._items[item])))
        return values

    def _data(self, content: int) -> bytes:
        found = self._connection.execute("SELECT digest, data FROM content WHERE id = ?", (content,)).fetchone()
        if found is None or hashlib.sha256(found[1]).digest() != found[0]:
            raise StoreError(f"damaged run database: content {content} is missing or altered")
        return found[1]


def put_images(connection: sqlite3.Connection, images: Mapping[str, bytes]) -> None:
    """Images stand among the other content: what is found by the sha256 of its bytes needs no table of its own."""
    for name, data in images.items():
        digest = _digest(name)
        if connection.execute("SELECT 1 FROM content WHERE digest = ?", (digest,)).fetchone():
            continue
        if hashlib.sha256(data).digest() != digest:
            raise StoreError(f"image {name} cannot be stored: its bytes have another sha256")
        connection.execute("INSERT INTO content (digest, data) VALUES (?, ?)", (digest, data))


def read_images(connection: sqlite3.Connection, names: Collection[str]) -> dict[str, bytes]:
    """Their bytes, checked. StoreError when one is missing or damaged."""
    found: dict[str, bytes] = {}
    for name in names:
        row = connection.execute("SELECT data FROM content WHERE digest = ?", (_digest(name),)).fetchone()
        if row is None:
            raise StoreError(f"image {name} is not in this run database")
        if hashlib.sha256(row[0]).hexdigest() != name:
            raise StoreError(f"damaged run database: image {name} is altered")
        found[name] = row[0]
    return found


def _digest(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError as error:
        raise StoreError(f"{name[:80]!r} is no image: images are named by their sha256 in hex") from error
