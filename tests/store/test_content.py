"""What a list begins with is stored once, however a call comes to it, and digests go on from a beginning."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforgerl.conversation import Beginnings
from openforgerl.errors import StoreError
from openforgerl.store.content import MOST_NEW, ContentReader, ContentWriter, WriterConnection
from openforgerl.store.packing import IdsDigest, digest_ids, pack_ids
from openforgerl.store.schema import TABLES
from openforgerl.types import Message, Role, Text

SAID = [Message(role=role, parts=(Text(text),)) for role in (Role.USER, Role.ASSISTANT) for text in ("a", "b" * 300)]


@pytest.fixture
def connection() -> Iterator[WriterConnection]:
    opened = sqlite3.connect(":memory:", isolation_level=None, factory=WriterConnection)
    opened.executescript(TABLES)
    yield opened
    opened.close()


@given(data=st.data())
def test_lists_are_written_as_if_none_had_been_known(data: st.DataObject) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=WriterConnection)
    connection.executescript(TABLES)
    writer, lists = ContentWriter(connection), connection.lists("s")
    messages: list[Message] = []
    for _ in range(data.draw(st.integers(1, 4))):
        kept = messages[: data.draw(st.integers(0, len(messages)))]
        messages = [*kept, *data.draw(st.lists(st.sampled_from(SAID), max_size=3))]
        fields = {"messages": tuple(messages), "tools": (), "n": 1, "odd": [1, {"x": [[]]}]}
        found = writer.fields(fields, lists)
        assert found == writer.skeleton(msgspec.to_builtins(fields))
        back = ContentReader(connection).decode(msgspec.json.encode(found))
        assert back == msgspec.json.decode(msgspec.json.encode(fields))
    connection.close()


def test_what_a_list_begins_with_is_not_looked_at_again(connection: WriterConnection) -> None:
    """A changed object behind the same identity would be: that is how we know."""
    writer, lists = ContentWriter(connection), Beginnings[object, int]()
    first, second = {"text": "a"}, {"text": "b"}
    begun = writer.fields({"messages": [first, second]}, lists)
    first["text"] = "never read"
    longer = writer.fields({"messages": [first, second, {"text": "c"}]}, lists)
    reader = ContentReader(connection)
    assert reader.decode(msgspec.json.encode(begun)) == {"messages": [{"text": "a"}, {"text": "b"}]}
    assert reader.decode(msgspec.json.encode(longer)) == {"messages": [{"text": "a"}, {"text": "b"}, {"text": "c"}]}


def test_lists_are_forgotten_with_what_is_rolled_back_and_when_too_many(connection: WriterConnection) -> None:
    item = {"text": "a"}
    ContentWriter(connection).fields({"messages": [item]}, connection.lists("s"))
    assert len(connection.lists("s").known([item])) == 1
    connection.forget()
    assert connection.lists("s").known([item]) == []
    connection.lists("s").keep([item], [1])
    for at in range(WriterConnection.MOST_SESSIONS):
        connection.lists(f"other {at}")
    assert connection.lists("s").known([item]) == []
    connection.lists("s").keep([item], [1])
    connection.drop_lists("s")
    assert connection.lists("s").known([item]) == []


def test_odd_names_are_written_as_everywhere(connection: WriterConnection) -> None:
    writer, lists = ContentWriter(connection), Beginnings[object, int]()
    value = {"\x00s": 1, "messages": [{"a": 1}]}
    found = writer.fields(value, lists)
    assert ContentReader(connection).decode(msgspec.json.encode(found)) == value
    with pytest.raises(StoreError, match="not a JSON value"):
        writer.fields({1: 2}, lists)


IDS = st.lists(st.integers(0, 3) | st.sampled_from([65_535, 65_536, 2**32 - 1]), max_size=6)


@given(begun=IDS, more=IDS)
def test_a_digest_goes_on_as_if_begun_anew(begun: list[int], more: list[int]) -> None:
    """The width of ids as stored depends on the largest, so it may have to begin anew."""
    whole = (*begun, *more)
    longer = IdsDigest(begun).with_more(whole)
    assert (longer.value, longer.length) == (hashlib.sha256(pack_ids(whole)).digest(), len(whole))
    assert longer.with_more((*whole, 7)).value == digest_ids((*whole, 7))
    assert IdsDigest(begun).value == digest_ids(begun)


def test_a_list_that_begins_too_large_is_not_held(connection: WriterConnection) -> None:
    writer, lists = ContentWriter(connection), Beginnings[object, int]()
    small, large = [{"text": "a"}], [{"text": "b" * MOST_NEW}]
    writer.fields({"messages": small, "input": large}, lists)
    assert (len(lists.known(small)), len(lists.known(large))) == (1, 0)
