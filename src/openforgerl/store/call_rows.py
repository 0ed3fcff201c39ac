"""Model calls as rows: a prompt is (base call, common length, new ids), the rest is content-addressed.

Runs inside a transaction of `Database`; knows nothing of threads or of asyncio.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from openforgerl.conversation import Beginnings
from openforgerl.errors import StoreError
from openforgerl.store.content import ContentReader, ContentWriter, WriterConnection, Written
from openforgerl.store.packing import (
    IdsDigest,
    common_prefix,
    digest_blobs,
    digest_ids,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from openforgerl.types import CallStatus, Conversation, ModelCall, OriginSpan, Prompt

_COLUMNS = (
    "id, call_id, status, base, common, new_ids, prompt_sha256, common_origins, new_origins, sampled_ids, "
    "logprobs, sampling_logprobs, detail, answer_sha256"
)
_APART = ("sampled_ids", "logprobs", "sampling_logprobs", "prompt")
"""Fields of a call that have columns of their own."""
_ASKED = ("request", "conversation")
"""Fields that are known when a call begins, and as long as its whole history."""
_AS_RECEIVED = ("response", "sampling_asked")
"""JSON from the wire, stored as it is."""


class RecentPrompts:
    """Prompts written lately, so that a long session's next call need not rebuild all before it.

    Found by call id and prompt digest, so an entry is right even when its row was rolled back. Used by the
    writing thread only.
    """

    MOST_IDS = 2_000_000

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, bytes], tuple[Prompt, IdsDigest]] = OrderedDict()
        self._ids = 0

    def put(self, call: ModelCall, digest: IdsDigest) -> None:
        """Remember the prompt of `call`; the longest unused ones go when there are more than `MOST_IDS` ids."""
        key = (call.call_id, digest.value)
        if key not in self._prompts:
            self._prompts[key] = call.prompt, digest
            self._ids += len(call.prompt.ids)
        while self._ids > self.MOST_IDS:
            _, (old, _) = self._prompts.popitem(last=False)
            self._ids -= len(old.ids)

    def get(self, call_id: str, digest: bytes) -> tuple[Prompt, IdsDigest] | None:
        """The prompt and its digest, or None when it is not remembered."""
        key = (call_id, digest)
        if key in self._prompts:
            self._prompts.move_to_end(key)
        return self._prompts.get(key)


class Base(msgspec.Struct, frozen=True):
    """What a new call's prompt is stored against."""

    row: int | None = None
    ids: tuple[int, ...] = ()
    """Its prompt and sampled ids."""
    origins: tuple[OriginSpan, ...] = ()
    digest: IdsDigest | None = None
    """Of its prompt's ids, where that is at hand."""


class CallReader:
    """Rebuilds calls; remembers prompts it has rebuilt, so that a session is read in one pass."""

    def __init__(self, connection: sqlite3.Connection, recent: RecentPrompts | None = None) -> None:
        self._connection = connection
        self._recent = recent
        self._content = ContentReader(connection)
        self._prompts: dict[int, tuple[tuple[int, ...], tuple[OriginSpan, ...]]] = {}
        self._sequences: dict[int, tuple[int, ...]] = {}

    def session(self, session_id: str, after: int, limit: int | None) -> list[ModelCall]:
        """Calls with index above `after`, by index, at most `limit`."""
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM calls WHERE session_id = ? AND idx > ? ORDER BY idx LIMIT ?",
            (session_id, after, -1 if limit is None else limit),
        ).fetchall()
        return [self._call(row) for row in rows]

    def find(self, call_id: str) -> ModelCall | None:
        """The call of that id, or None."""
        row = self._connection.execute(f"SELECT {_COLUMNS} FROM calls WHERE call_id = ?", (call_id,)).fetchone()
        return None if row is None else self._call(row)

    def base(self, call: ModelCall) -> Base:
        """What a new call's prompt is stored against.

        Its parent when that is here, else the session's first call (system prompt and tools are the same).
        """
        columns = "SELECT id, call_id, prompt_sha256 FROM calls"
        row = None
        if call.parent_call_id is not None:
            row = self._connection.execute(f"{columns} WHERE call_id = ?", (call.parent_call_id,)).fetchone()
        if row is None:
            row = self._connection.execute(
                f"{columns} WHERE session_id = ? ORDER BY idx LIMIT 1", (call.session_id,)
            ).fetchone()
        if row is None:
            return Base()
        recent = self._recent.get(row[1], row[2]) if self._recent else None
        return Base(row[0], self._sequence(row[0]), self._prompt(row[0])[1], recent[1] if recent else None)

    def _call(self, row: tuple[Any, ...]) -> ModelCall:
        try:
            if digest_blobs(*row[9:13]) != row[13]:
                raise StoreError(f"damaged run database: the record of call {row[1]} does not match its digest")
            fields = self._content.decode(row[12])
            ids, origins = self._prompt(row[0])
            fields["prompt"] |= {"ids": ids, "origins": origins}
            fields["sampled_ids"] = unpack_ids(row[9])
            fields["logprobs"] = unpack_floats(row[10])
            fields["sampling_logprobs"] = unpack_floats(row[11])
            return msgspec.convert(fields, ModelCall)
        except (msgspec.ValidationError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"damaged run database: call {row[1]} cannot be read ({error})") from error

    def _sequence(self, row_id: int) -> tuple[int, ...]:
        """Prompt and sampled ids; a running call has none yet, so nothing is stored against what may change."""
        if row_id not in self._sequences:
            (sampled,) = self._connection.execute("SELECT sampled_ids FROM calls WHERE id = ?", (row_id,)).fetchone()
            self._sequences[row_id] = self._prompt(row_id)[0] + unpack_ids(sampled)
        return self._sequences[row_id]

    def _prompt(self, row_id: int) -> tuple[tuple[int, ...], tuple[OriginSpan, ...]]:
        """Rebuilds from the nearest remembered base forwards; no recursion, sessions can be long."""
        pending: list[tuple[Any, ...]] = []
        at: int | None = row_id
        while at is not None and at not in self._prompts:
            row = self._connection.execute(f"SELECT {_COLUMNS} FROM calls WHERE id = ?", (at,)).fetchone()
            if row is None or (row[3] is not None and row[3] >= at):
                raise StoreError(f"damaged run database: call row {at} is missing or its base comes after it")
            recent = self._recent.get(row[1], row[6]) if self._recent else None
            if recent is not None:
                self._prompts[at] = (recent[0].ids, recent[0].origins)
                break
            pending.append(row)
            at = row[3]
        for row in reversed(pending):
            base: tuple[int, ...] = ()
            base_origins: tuple[OriginSpan, ...] = ()
            if row[3] is not None:
                base, base_origins = self._sequence(row[3]), self._prompts[row[3]][1]
            ids = base[: row[4]] + unpack_ids(row[5])
            if digest_ids(ids) != row[6]:
                raise StoreError(f"damaged run database: the prompt of call {row[1]} does not match its digest")
            try:
                origins = msgspec.json.decode(row[8], type=tuple[OriginSpan, ...])
            except (msgspec.DecodeError, ValueError) as error:
                raise StoreError(f"damaged run database: origins of call {row[1]} ({error})") from error
            self._prompts[row[0]] = (ids, base_origins[: row[7]] + origins)
        return self._prompts[row_id]


def insert_call(connection: WriterConnection, call: ModelCall, recent: RecentPrompts) -> None:
    """Store a new call, whatever its status. StoreError when its id or its index in the session is taken."""
    if call.status is CallStatus.INTENT and call.sampled_ids:
        raise StoreError(f"call {call.call_id} is an intent and cannot have sampled ids yet")
    base = CallReader(connection, recent).base(call)
    ids, origins = call.prompt.ids, call.prompt.origins
    common = common_prefix(base.ids, ids)
    goes_on = base.digest is not None and common >= base.digest.length
    digest = base.digest.with_more(ids) if base.digest is not None and goes_on else IdsDigest(ids)
    same = common_prefix(base.origins, origins)
    try:
        connection.execute(
            "INSERT INTO calls (call_id, session_id, idx, status, base, common, new_ids, prompt_sha256, "
            "common_origins, new_origins, sampled_ids, logprobs, sampling_logprobs, detail, answer_sha256) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                call.call_id,
                call.session_id,
                call.index,
                call.status.value,
                base.row,
                common,
                pack_ids(ids[common:]),
                digest.value,
                same,
                msgspec.json.encode(origins[same:]),
                *_answer_columns(connection, call),
            ),
        )
    except sqlite3.IntegrityError as error:
        raise StoreError(
            f"call {call.call_id} or index {call.index} of session {call.session_id} is recorded already"
        ) from error
    recent.put(call, digest)


def finish_call(connection: WriterConnection, call: ModelCall, recent: RecentPrompts) -> None:
    """Complete a call that was begun. StoreError when it was not, is finished, or has another prompt now."""
    row = connection.execute(
        "SELECT id, status, prompt_sha256 FROM calls WHERE call_id = ?", (call.call_id,)
    ).fetchone()
    if row is None:
        raise StoreError(f"call {call.call_id} was never begun: record the intent before generating")
    if row[1] != CallStatus.INTENT.value:
        raise StoreError(f"call {call.call_id} is finished already ({row[1]}); a recorded call never changes")
    if call.status is CallStatus.INTENT:
        raise StoreError(f"call {call.call_id} cannot be finished with status intent")
    begun = recent.get(call.call_id, row[2])
    if (begun is None or begun[0].ids is not call.prompt.ids) and row[2] != digest_ids(call.prompt.ids):
        raise StoreError(f"call {call.call_id} has another prompt than when it was begun")
    connection.execute(
        "UPDATE calls SET status = ?, sampled_ids = ?, logprobs = ?, sampling_logprobs = ?, detail = ?, "
        "answer_sha256 = ? WHERE id = ?",
        (call.status.value, *_answer_columns(connection, call), row[0]),
    )


def import_call(connection: WriterConnection, call: ModelCall, recent: RecentPrompts) -> None:
    """Store a copy of a call recorded elsewhere; again is nothing. StoreError when a different one is here."""
    known = CallReader(connection).find(call.call_id)
    if known is None:
        insert_call(connection, call, recent)
    elif known.status is CallStatus.INTENT and call.status is not CallStatus.INTENT:
        finish_call(connection, call, recent)
    elif known != call:
        raise StoreError(f"call {call.call_id} is here already and differs from the copy; the first one stands")


def import_calls(
    connection: WriterConnection, session_id: str, calls: Sequence[ModelCall], recent: RecentPrompts
) -> None:
    """`import_call` for all of them, or for none when one is refused."""
    for call in calls:
        if call.session_id != session_id:
            raise StoreError(f"call {call.call_id} belongs to session {call.session_id}, not {session_id}")
        import_call(connection, call, recent)


def _answer_columns(
    connection: WriterConnection, call: ModelCall
) -> tuple[bytes, bytes | None, bytes | None, bytes, bytes]:
    writer = ContentWriter(connection)
    # The end of a call is written with the same request and conversation as its beginning.
    begun = connection.take(call.call_id)
    lists = connection.lists(call.session_id)
    written = {name: _written(writer, begun.get(name), getattr(call, name), lists) for name in _ASKED}
    if call.status is CallStatus.INTENT:
        connection.keep(call.call_id, written)
    try:
        fields: dict[str, Any] = {
            name: getattr(call, name) if name in _AS_RECEIVED else msgspec.to_builtins(getattr(call, name))
            for name in call.__struct_fields__
            if name not in _APART and name not in _ASKED
        }
    except (TypeError, ValueError) as error:
        raise StoreError(f"call {call.call_id}: not a JSON value that can be stored: {error}") from error
    fields["prompt"] = {
        "images": msgspec.to_builtins(call.prompt.images),
        "template_digest": call.prompt.template_digest,
    }
    detail = writer.skeleton(fields) | {name: part.skeleton for name, part in written.items()}
    columns = (
        pack_ids(call.sampled_ids),
        pack_floats(call.logprobs),
        pack_floats(call.sampling_logprobs),
        msgspec.json.encode(detail),
    )
    return (*columns, digest_blobs(*columns))


def _written(writer: ContentWriter, before: Written | None, value: Any, lists: Beginnings[Any, int]) -> Written:
    """How a field is written: as before, if it is the same object."""
    if before is not None and before.value is value:
        return before
    if isinstance(value, Conversation):
        return Written(value, writer.fields(msgspec.structs.asdict(value), lists))
    return Written(value, writer.fields(value, lists) if isinstance(value, dict) else writer.skeleton(value))
