"""Sessions and model calls: what the proxy records."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence

import msgspec

from openforgerl.errors import StoreError
from openforgerl.store.call_rows import CallReader, RecentPrompts, finish_call, import_calls, insert_call
from openforgerl.store.content import WriterConnection, put_images, read_images
from openforgerl.store.database import Database
from openforgerl.types import CallStatus, ModelCall, Session, SessionState


class CallStore:
    """Sessions and their calls in a run database. Every method returns after COMMIT.

    The database is the caller's: open it before, close it after.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recent = RecentPrompts()

    async def put_session(self, session: Session) -> None:
        """Record a new session; the same again is nothing. StoreError when the id is taken by another."""
        await self._database.write(lambda connection: _put_session(connection, session))

    async def seal_session(self, session_id: str, at: float) -> None:
        """Mark a session sealed since `at` (Unix seconds). Idempotent: the first time stands."""

        def work(connection: WriterConnection) -> None:
            changed = connection.execute(
                "UPDATE sessions SET state = ?, sealed_at = coalesce(sealed_at, ?) WHERE session_id = ?",
                (SessionState.SEALED.value, at, session_id),
            ).rowcount
            if not changed:
                raise StoreError(f"no session {session_id} to seal")
            connection.drop_lists(session_id)

        await self._database.write(work)

    async def sessions(self) -> list[Session]:
        """All sessions, in order of recording, with their present state."""
        return await self._database.read(_sessions)

    async def begin(self, call: ModelCall) -> None:
        """Commit the intent row, before anything is sampled. `call.status` must be `intent`."""
        if call.status is not CallStatus.INTENT:
            raise StoreError(f"call {call.call_id} must begin with status intent, not {call.status}")
        await self._database.write(lambda connection: insert_call(connection, call, self._recent))

    async def finish(self, call: ModelCall) -> None:
        """Commit the finished call, before its last byte is sent. StoreError when not begun or finished already."""
        await self._database.write(lambda connection: finish_call(connection, call, self._recent))

    async def put_images(self, images: Mapping[str, bytes]) -> None:
        """Keep the bytes of images by their sha256 in hex, each once. StoreError when one is not what its name says."""
        await self._database.write(lambda connection: put_images(connection, images))

    async def images(self, names: Collection[str]) -> dict[str, bytes]:
        """The bytes of these images by sha256; StoreError when one is not here."""
        return await self._database.read(lambda connection: read_images(connection, names))

    async def calls(self, session_id: str, after: int = -1, limit: int | None = None) -> list[ModelCall]:
        """Calls with index above `after`, in order of arrival, at most `limit`; equal to what was recorded."""
        return await self._database.read(lambda connection: CallReader(connection).session(session_id, after, limit))

    async def import_calls(self, session_id: str, calls: Sequence[ModelCall]) -> None:
        """Copy calls recorded elsewhere, all or none; repeating a page is nothing.

        Returning is the acknowledgement: the calls are committed. StoreError when one differs from what is here.
        """
        await self._database.write(lambda connection: import_calls(connection, session_id, calls, self._recent))

    async def close(self) -> None:
        """Wait until everything asked for so far is committed. The database stays open: others use it too."""
        await self._database.write(lambda _: None)


def _put_session(connection: sqlite3.Connection, session: Session) -> None:
    record = msgspec.json.encode(session)
    row = connection.execute("SELECT record FROM sessions WHERE session_id = ?", (session.session_id,)).fetchone()
    if row is not None:
        if msgspec.json.decode(row[0]) == msgspec.json.decode(record):
            return
        raise StoreError(f"session {session.session_id} exists already; every attempt needs a session id of its own")
    connection.execute(
        "INSERT INTO sessions (session_id, state, record) VALUES (?, ?, ?)",
        (session.session_id, session.state.value, record),
    )


def _sessions(connection: sqlite3.Connection) -> list[Session]:
    sessions: list[Session] = []
    for session_id, state, record in connection.execute(
        "SELECT session_id, state, record FROM sessions ORDER BY rowid"
    ):
        try:
            session = msgspec.json.decode(record, type=Session)
            sessions.append(msgspec.structs.replace(session, state=SessionState(state)))
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"damaged run database: session {session_id} cannot be read ({error})") from error
    return sessions
