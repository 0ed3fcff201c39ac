"""One SQLite file, one writing process, one writing thread.

Durability: WAL with synchronous=NORMAL. A commit has handed all its pages to the kernel before COMMIT
returns, and what the kernel holds outlives the process, so `kill -9` at any moment loses no acknowledged
write. What NORMAL leaves out is the fsync of each commit: a power cut may undo the last commits (never tear
one, never damage the file), after which a run resumes from a slightly earlier state. `synchronous="FULL"`
buys that too, at one fsync a group of writes.

Group commit: writes wait in a queue; the thread takes all that wait, runs each in a savepoint of its own,
commits once, and only then acknowledges. A write that fails is rolled back alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

from openforgerl.errors import OpenForgeError, StoreError
from openforgerl.store.content import WriterConnection
from openforgerl.store.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GROUP = 512
"""Most writes that share one transaction."""
_READERS = 2
_BUSY_TIMEOUT = 30.0
"""Seconds to wait for another connection's lock (a checkpoint, a backup tool)."""


class _Job:
    """A write waiting for its turn. `done` is set after COMMIT, or with the error."""

    def __init__(self, work: Callable[[WriterConnection], Any]) -> None:
        self.work = work
        self.done: Future[Any] = Future()
        self.done.set_running_or_notify_cancel()  # from here on nobody can cancel it


class Database:
    """An open run database. Make one with `Database.open` (the writer) or `Database.read_only`."""

    def __init__(self, path: Path, writer: WriterConnection | None, lock: int | None) -> None:
        self.path = path
        self._writer = writer
        self._lock = lock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._immutable = False
        self._readers = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="store-read")
        self._reader_of_thread = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []
        # A daemon: a process that dies without close() must not hang on us; unacknowledged writes were never
        # promised.
        self._thread = threading.Thread(target=self._write_loop, name="store-write", daemon=True)
        if writer is not None:
            self._thread.start()

    @classmethod
    def open(cls, path: Path | str, *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> Database:
        """Open for writing; makes file and schema when missing.

        Raises StoreError when another process has it open for writing, when its schema is of another version,
        or when it is damaged or no run database; each message says what to do.
        """
        path = Path(path).absolute()
        lock = _take_lock(path)
        try:
            connection = sqlite3.connect(
                path,
                isolation_level=None,
                check_same_thread=False,
                timeout=_BUSY_TIMEOUT,
                factory=WriterConnection,
            )
            try:
                _prepare(connection, path, synchronous)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            os.close(lock)
            raise store_error(path, error) from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, connection, lock)

    @classmethod
    def read_only(cls, path: Path | str) -> Database:
        """Open for reading, beside a live writer or without one. Raises StoreError like `open`.

        SQLite keeps an index of the log (-shm) beside the file even to read it. In a folder where none can be
        made, a file without a log is whole by itself and is read as one that nobody writes; a log is refused.
        """
        path = Path(path).absolute()
        if not path.is_file():
            raise StoreError(f"no run database at {path}: name a run folder's run.sqlite")
        database = cls(path, None, None)
        try:
            try:
                _check_schema(database._connect_reader(), path)
            except sqlite3.OperationalError as error:
                if _primary(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                    raise
                if Path(f"{path}-wal").exists():
                    raise StoreError(
                        f"{path}: the folder must be writable to read a run that was not closed; copy it ({error})"
                    ) from error
                database._immutable = True
                _check_schema(database._connect_reader(), path)
        except sqlite3.Error as error:
            database._close()
            raise store_error(path, error) from error
        except BaseException:
            database._close()
            raise
        return database

    async def write(self, work: Callable[[WriterConnection], T]) -> T:
        """Run `work` in a transaction; returns its result after COMMIT.

        `work` runs in the writing thread and may be rolled back, so it touches nothing but the connection. A
        cancelled waiter does not cancel the write: what was asked to be recorded is recorded. Raises what
        `work` raised, or StoreError.
        """
        job = _Job(work)
        with self._gate:
            if self._writer is None:
                raise StoreError(f"{self.path} is open for reading only")
            if self._closed:
                raise StoreError(f"{self.path} is closed")
            self._jobs.put(job)
        return await asyncio.wrap_future(job.done)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` over one consistent snapshot that contains every acknowledged write."""
        with self._gate:
            if self._closed:
                raise StoreError(f"{self.path} is closed")
            future = self._readers.submit(self._read, work)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Finish the waiting writes, fold the log into the file, let go of the lock. Idempotent."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _close(self) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._readers.shutdown(wait=True)
        for connection in self._reader_connections:
            connection.close()
        if self._writer is not None:
            self._thread.join()
            try:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                # Everything is committed in the log; whoever opens the file next folds it in.
                _log.warning("%s: the log was not folded into the file: %s", self.path, error)
            self._writer.close()
        if self._lock is not None:
            os.close(self._lock)

    def _write_loop(self) -> None:
        running = True
        while running:
            jobs: list[_Job] = []
            job = self._jobs.get()
            while job is not None:
                jobs.append(job)
                if len(jobs) == _GROUP or self._jobs.empty():
                    break
                job = self._jobs.get()
            running = job is not None
            if jobs:
                self._commit(jobs)

    def _commit(self, jobs: list[_Job]) -> None:
        connection = self._writer
        assert connection is not None
        outcomes: list[tuple[Any, Exception | None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                outcomes.append(_run(connection, job.work))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # Disk full, I/O error, damage: nothing of this group is in the file, and nobody was told it is.
            connection.forget()
            _give_up(connection, self.path)
            for job in jobs:
                job.done.set_exception(store_error(self.path, error))
            return
        for job, (result, error) in zip(jobs, outcomes, strict=True):
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(store_error(self.path, error))

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection: sqlite3.Connection | None = getattr(self._reader_of_thread, "connection", None)
            if connection is None:
                connection = self._connect_reader()
                self._reader_of_thread.connection = connection
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error

    def _connect_reader(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=ro" + ("&immutable=1" if self._immutable else ""),
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_TIMEOUT,
        )
        with self._gate:
            self._reader_connections.append(connection)
        return connection


def store_error(path: Path, error: Exception) -> Exception:
    """The one door of sqlite3: its errors as StoreError with what to do; our own errors pass unchanged."""
    if isinstance(error, OpenForgeError) or not isinstance(error, sqlite3.Error):
        return error
    advice = {
        sqlite3.SQLITE_FULL: "the disk is full; nothing was half-written. Free space and run the same command again",
        sqlite3.SQLITE_IOERR: "the disk failed; nothing was half-written. Check it and run the same command again",
        sqlite3.SQLITE_BUSY: "another program holds the file locked. Stop it and run the same command again",
        sqlite3.SQLITE_READONLY: "the file cannot be written. Check its owner and mode",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened. Check that its folder exists and may be read",
        sqlite3.SQLITE_CORRUPT: _DAMAGED,
        sqlite3.SQLITE_NOTADB: "this is no SQLite database, or its beginning is damaged. " + _DAMAGED,
        sqlite3.SQLITE_CONSTRAINT: "the write contradicts what is stored",
    }.get(_primary(error), "the write was refused")
    mapped = StoreError(f"{path}: {advice} ({error})")
    mapped.__cause__ = error
    return mapped


def _primary(error: sqlite3.Error) -> int:
    """SQLite's result code without its details; -1 for an error of the Python module."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else -1


_DAMAGED = (
    "the file is damaged. Keep a copy, try `sqlite3 FILE .recover | sqlite3 NEW`, and put NEW in its place, "
    "or start a new run folder"
)


def _run(connection: WriterConnection, work: Callable[[WriterConnection], Any]) -> tuple[Any, Exception | None]:
    """One write in its own savepoint. Raises sqlite3.Error only when the whole transaction is gone."""
    connection.execute("SAVEPOINT job")
    try:
        result = work(connection)
    except Exception as error:
        if not connection.in_transaction:  # SQLite rolls everything back by itself on a full disk
            raise error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error)) from error
        connection.execute("ROLLBACK TO job")
        connection.forget()
        connection.execute("RELEASE job")
        return None, error
    connection.execute("RELEASE job")
    return result, None


def _give_up(connection: sqlite3.Connection, path: Path) -> None:
    """Roll back what is left of a failed transaction; the thread must live on to answer whoever waits."""
    if not connection.in_transaction:
        return
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        _log.error("%s: a failed transaction could not be rolled back: %s", path, error)


def _take_lock(path: Path) -> int:
    """An exclusive lock beside the database; the kernel drops it when the process dies, however it dies."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"{path}: cannot make a lock file beside it ({error}). Does its folder exist?") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 64, 0).decode(errors="replace").strip()
        os.close(lock)
        raise StoreError(
            f"{path} is being written by another process (pid {holder or 'unknown'}). "
            "Stop that one first, or use another run folder; reading beside it is fine"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _prepare(connection: sqlite3.Connection, path: Path, synchronous: str) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if empty and version == 0:
        connection.execute("PRAGMA journal_mode = WAL")
        # One transaction: a kill while the tables are made leaves an empty file, which is made anew.
        connection.executescript(
            f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    _check_schema(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is not a run database of OpenForgeRL. Name another run folder")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, this program reads and writes version {SCHEMA_VERSION}. "
            "Use the OpenForgeRL version that made it, or start a new run folder"
        )
