"""Calls come back equal; disk grows with what is new; a recorded call never changes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforgerl.errors import StoreError
from openforgerl.store import CallStore, Database
from openforgerl.store.content import ContentReader, ContentWriter, WriterConnection
from openforgerl.store.packing import common_prefix, digest_blobs, pack_floats, pack_ids, unpack_floats, unpack_ids
from openforgerl.store.schema import TABLES
from openforgerl.types import (
    CallStatus,
    Message,
    PlacedImage,
    Prompt,
    Reasoning,
    Role,
    SessionState,
    ToolCall,
    WeightsSpan,
)

from .builders import call, intent, long_session, session

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "\x00s", "\x00c", "\x00d", ""]) | st.text("xy"), inner, max_size=4)
    ),
    max_leaves=12,
)


async def test_a_call_comes_back_equal(database: Database) -> None:
    store = CallStore(database)
    first = call(
        prompt=Prompt(ids=(1, 2, 70_000), images=(PlacedImage(sha256="x", start=0, count=1, grid=(1, 2, 2)),)),
        sampling_logprobs=(0.0, -0.0, -5e-324),
        weights_spans=(WeightsSpan(start=0, stop=2, version=4), WeightsSpan(start=2, stop=3, version=5)),
        answer=Message(
            role=Role.ASSISTANT,
            parts=(Reasoning("hm", "handle"),),
            tool_calls=(ToolCall(id="c1", name="bash", arguments='{"command":"x'),),
        ),
        off_policy="truncation",
        warnings=("unlisted field x",),
        request_headers={"user-agent": "pi/1.6.0"},
        request={"big": 2**70, "one": 1, "one point": 1.0, "text": "ü" * 500, "nested": [[], [{}], [[1], {"a": None}]]},
        error="late",
    )
    await store.begin(intent(first))
    assert await store.calls("s") == [intent(first)]
    await store.finish(first)
    (back,) = await store.calls("s")
    assert back == first
    assert msgspec.json.encode(back) == msgspec.json.encode(first)  # 1 and 1.0, -0.0 and 0.0 too


async def test_a_session_comes_back_in_pages_and_whole(database: Database) -> None:
    store = CallStore(database)
    calls = long_session(12)
    for one in calls:
        await store.begin(intent(one))
        await store.finish(one)
    assert await store.calls("s") == calls
    assert await store.calls("s", after=3, limit=4) == calls[4:8]
    assert await store.calls("s", after=11) == []
    assert await store.calls("other") == []


async def test_a_child_of_a_running_call_keeps_its_prompt_when_that_finishes(database: Database) -> None:
    store = CallStore(database)
    parent = call(0, prompt=Prompt(ids=(1, 2, 3)), sampled_ids=(4, 5), logprobs=None)
    child = call(1, parent=parent.call_id, prompt=Prompt(ids=(1, 2, 3, 4, 5, 6)))
    await store.begin(intent(parent))
    await store.begin(intent(child))
    await store.finish(parent)
    await store.finish(child)
    assert await store.calls("s") == [parent, child]


@pytest.mark.parametrize("turns", [40])
async def test_disk_grows_with_what_is_new(tmp_path: Path, turns: int) -> None:
    async def size(count: int) -> int:
        async with Database.open(tmp_path / f"{count}.sqlite") as database:
            store = CallStore(database)
            for one in long_session(count):
                await store.begin(intent(one))
                await store.finish(one)
        return (tmp_path / f"{count}.sqlite").stat().st_size

    sizes = {count: await size(count) for count in (turns, 2 * turns, 4 * turns)}
    first, second = sizes[2 * turns] - sizes[turns], sizes[4 * turns] - sizes[2 * turns]
    # Twice the turns, twice the growth (2.0); storing whole conversations would give 4.
    assert second / first == pytest.approx(2.0, rel=0.2)
    # What a turn brings: 400 + 90 characters of text, 80 ids of four bytes, 20 doubles; the rest is bookkeeping.
    assert second / (2 * turns) < 5 * (490 + 320 + 160)


async def test_a_recorded_call_never_changes(database: Database) -> None:
    store = CallStore(database)
    first = call()
    with pytest.raises(StoreError, match="never begun"):
        await store.finish(first)
    await store.begin(intent(first))
    with pytest.raises(StoreError, match="recorded already"):
        await store.begin(intent(first))
    with pytest.raises(StoreError, match="another prompt"):
        await store.finish(msgspec.structs.replace(first, prompt=Prompt(ids=(1, 2, 4))))
    with pytest.raises(StoreError, match="must begin with status intent"):
        await store.begin(first)
    with pytest.raises(StoreError, match="cannot have sampled ids yet"):
        await store.begin(msgspec.structs.replace(intent(call(1)), sampled_ids=(1,)))
    await store.finish(first)
    with pytest.raises(StoreError, match="finished already"):
        await store.finish(msgspec.structs.replace(first, sampled_ids=(), logprobs=None))
    with pytest.raises(StoreError, match="recorded already"):
        await store.begin(intent(call(0, call_id="another id, same index")))
    assert await store.calls("s") == [first]


async def test_importing_is_idempotent_and_all_or_nothing(database: Database) -> None:
    store = CallStore(database)
    calls = long_session(4)
    await store.import_calls("s", [*calls[:2], intent(calls[2])])
    await store.import_calls("s", calls)
    await store.import_calls("s", calls)
    assert await store.calls("s") == calls
    new = call(4)
    with pytest.raises(StoreError, match="differs"):
        await store.import_calls("s", [new, msgspec.structs.replace(calls[1], sampled_ids=(1,), logprobs=None)])
    with pytest.raises(StoreError, match="belongs to session other"):
        await store.import_calls("s", [new, call(5, session="other")])
    assert await store.calls("s") == calls


async def test_sessions(database: Database) -> None:
    store = CallStore(database)
    await store.put_session(session("a"))
    await store.put_session(session("b"))
    await store.put_session(session("a"))
    await store.seal_session("a", 20.0)
    await store.seal_session("a", 30.0)
    assert [(one.session_id, one.state) for one in await store.sessions()] == [
        ("a", SessionState.SEALED),
        ("b", SessionState.OPEN),
    ]
    await store.put_session(session("a"))  # a repeat does not open it again
    assert (await store.sessions())[0].state is SessionState.SEALED
    with pytest.raises(StoreError, match="exists already"):
        await store.put_session(msgspec.structs.replace(session("a"), key_sha256="cd" * 32))
    with pytest.raises(StoreError, match="no session c"):
        await store.seal_session("c", 1.0)


async def test_what_is_no_json_is_refused_and_nothing_is_written(database: Database) -> None:
    store = CallStore(database)
    for bad in (float("nan"), float("inf"), {1: 2}, object(), "\ud800"):
        with pytest.raises(StoreError, match="not a JSON value"):
            await store.begin(intent(call(request={"x": [bad, "y" * 300]})))
    assert await store.calls("s") == []
    assert await database.read(lambda connection: connection.execute("SELECT count(*) FROM content").fetchone()) == (0,)


async def test_what_was_rolled_back_is_not_remembered_as_stored(database: Database) -> None:
    """The refused call shares its messages with the next one, and their ids are given out again to others."""
    store = CallStore(database)
    first, second, third = long_session(3)
    await store.begin(intent(first))
    with pytest.raises(StoreError, match="recorded already"):
        await store.begin(intent(msgspec.structs.replace(third, index=0)))
    await store.begin(intent(call(7, request={"messages": [{"role": "user", "content": "another " * 99}]})))
    await store.begin(intent(second))
    await store.begin(intent(third))
    assert (await store.calls("s"))[:3] == [intent(one) for one in (first, second, third)]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(JSON, min_size=1, max_size=3))
def test_any_json_comes_back(values: list[object]) -> None:

    connection = sqlite3.connect(":memory:", isolation_level=None, factory=WriterConnection)
    connection.executescript(TABLES)
    stored = [ContentWriter(connection).encode(value) for value in values]
    back = [ContentReader(connection).decode(data) for data in stored]
    connection.close()
    assert msgspec.json.encode(back) == msgspec.json.encode(values)


@given(ids=st.lists(st.integers(0, 2**32 - 1)), cut=st.integers(0, 50), tail=st.lists(st.integers(0, 3)))
def test_ids_come_back_and_prefixes_are_exact(ids: list[int], cut: int, tail: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    other = (*ids[:cut], *tail)
    expected = 0
    for left, right in zip(ids, other, strict=False):
        if left != right:
            break
        expected += 1
    assert common_prefix(tuple(ids), other) == expected


def test_damaged_numbers_are_refused() -> None:
    for blob in (b"X12", b"I123", b"H1"):
        with pytest.raises(StoreError, match="damaged token ids"):
            unpack_ids(blob)
    with pytest.raises(StoreError, match="damaged log-probs"):
        unpack_floats(b"1234567")
    assert unpack_floats(pack_floats((0.1, -0.0, 5e-324))) == (0.1, -0.0, 5e-324)
    assert unpack_floats(pack_floats(None)) is None
    assert len({digest_blobs(b"a", b"b"), digest_blobs(b"ab", b""), digest_blobs(b"ab", None)}) == 3


def test_ids_out_of_range_are_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(StoreError, match="token ids"):
            pack_ids([1, bad])


async def test_status_of_a_begun_call_is_intent(database: Database) -> None:
    store = CallStore(database)
    await store.begin(intent(call()))
    assert [one.status for one in await store.calls("s")] == [CallStatus.INTENT]
    with pytest.raises(StoreError, match="cannot be finished with status intent"):
        await store.finish(intent(call()))
