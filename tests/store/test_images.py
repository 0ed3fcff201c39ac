"""Images by content: once, checked when written and when read."""

from __future__ import annotations

import hashlib
import sqlite3

import pytest

from openforgerl.errors import StoreError
from openforgerl.store import CallStore, Database

DATA = b"\x89PNG and more"
NAME = hashlib.sha256(DATA).hexdigest()


async def test_an_image_is_kept_once(database: Database) -> None:
    store = CallStore(database)
    await store.put_images({NAME: DATA})
    await store.put_images({NAME: DATA})
    assert await store.images({NAME}) == {NAME: DATA}
    assert await store.images(()) == {}

    def copies(connection: sqlite3.Connection) -> int:
        return connection.execute("SELECT count(*) FROM content WHERE data = ?", (DATA,)).fetchone()[0]

    assert await database.read(copies) == 1


async def test_images_that_are_not_what_their_name_says(database: Database) -> None:
    store = CallStore(database)
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(StoreError, match="its bytes have another sha256"):
        await store.put_images({NAME: DATA, other: DATA})
    with pytest.raises(StoreError, match="is not in this run database"):
        await store.images({NAME})  # all or none
    with pytest.raises(StoreError, match="named by their sha256"):
        await store.put_images({"red.png": DATA})
    await store.put_images({NAME: DATA})
    await database.write(
        lambda connection: connection.execute("UPDATE content SET data = x'00' WHERE data = ?", (DATA,)).rowcount
    )
    with pytest.raises(StoreError, match="is altered"):
        await store.images({NAME})
