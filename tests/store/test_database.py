"""One writer, many readers, kill -9, damage, a full disk, other versions."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openforgerl.errors import StoreError
from openforgerl.store import CallStore, Database, RunStore
from openforgerl.types import CallStatus

from .builders import attempt, call, intent, long_session, rollout

WRITER = Path(__file__).with_name("crash_writer.py")


# -- kill -9


async def check_acknowledged(path: Path, lines: list[str]) -> int:
    """Every acknowledged write is there, nothing is doubled, everything reads; the first unused number."""
    said = {
        kind: {int(line.split()[1]) for line in lines if line.startswith(kind)}
        for kind in ("begin", "finish", "commit")
    }
    async with Database.open(path) as database:
        calls, runs = CallStore(database), RunStore(database)
        stored = {one.index: one for one in await calls.calls("s")}
        assert len(stored) == len(await calls.calls("s"))
        assert said["begin"] <= stored.keys()
        assert said["finish"] <= {index for index, one in stored.items() if one.status is CallStatus.COMPLETE}
        for index, one in stored.items():
            expected = call(index, request={"messages": [{"role": "user", "content": f"{index} " * 200}]})
            assert one == (expected if one.status is CallStatus.COMPLETE else intent(expected))
        attempts = {one.rollout_id: one for one in await runs.attempts()}
        done = {name for name, one in attempts.items() if one.outcome is not None}
        assert {f"r{number}" for number in said["commit"]} <= done
        assert {one.rollout_id for one in await runs.unfinished()} == attempts.keys() - done
        # Outcome and samples are one transaction: exactly the finished ones have theirs.
        with_samples = await runs.samples([one.attempt_id for one in attempts.values()])
        assert {key.removesuffix("-a0") for key in with_samples} == done
        assert all(len(one.samples) == 1 for one in with_samples.values())
        return max([-1, *stored, *(one.index for one in await runs.rollouts())]) + 1


def write_until_killed(path: Path, first: int, seconds: float) -> list[str]:
    """Run the writer and kill -9 it that long after its first sign of life; what it acknowledged."""
    process = subprocess.Popen([sys.executable, str(WRITER), str(path), str(first)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "open\n"
        timer = threading.Timer(seconds, os.kill, (process.pid, signal.SIGKILL))
        timer.start()
        lines = process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    timer.join()
    return lines


async def test_kill_9_loses_no_acknowledged_write(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    first = 0
    lines: list[str] = []
    for seed in range(10):
        seconds = random.Random(seed).uniform(0.0, 0.15)
        lines += await asyncio.to_thread(write_until_killed, path, first, seconds)
        first = await check_acknowledged(path, lines)
    assert len(lines) > 20  # the writer did get somewhere


async def test_a_lost_write_would_be_seen(tmp_path: Path) -> None:
    """The check above is no formality: take an acknowledged row away and it fails."""
    path = tmp_path / "run.sqlite"
    lines: list[str] = []
    while not any(line.startswith("commit") for line in lines):
        first = await check_acknowledged(path, lines) if lines else 0
        lines += await asyncio.to_thread(write_until_killed, path, first, 0.2)
    await check_acknowledged(path, lines)
    number = next(line.split()[1] for line in lines if line.startswith("commit"))
    for copy, damage in enumerate(
        ("UPDATE attempts SET outcome = NULL, totals = NULL", "DELETE FROM samples", "DELETE FROM calls")
    ):
        where = f"idx = {number}" if "calls" in damage else f"attempt_id = 'r{number}-a0'"
        damaged = shutil.copy(path, tmp_path / f"{copy}.sqlite")
        with sqlite3.connect(damaged) as connection:
            assert connection.execute(f"{damage} WHERE {where}").rowcount == 1
        connection.close()
        with pytest.raises((AssertionError, StoreError)):
            await check_acknowledged(damaged, lines)


# -- one writer, many readers


async def test_a_second_writing_process_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with Database.open(path):
        with pytest.raises(StoreError, match=rf"pid {os.getpid()}.*Stop that one first"):
            Database.open(path)
        script = f"from openforgerl.store import Database; Database.open({str(path)!r})"
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        _, errors = await other.communicate()
        assert other.returncode == 1
        assert f"is being written by another process (pid {os.getpid()})" in errors.decode()
    async with Database.open(path):  # closing lets go
        pass


async def test_readers_beside_a_live_writer_see_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with Database.open(path) as database:
        store = CallStore(database)
        calls = long_session(30)
        seen: list[int] = []
        done = asyncio.Event()

        async def watch() -> None:
            async with Database.read_only(path) as reader:
                while not done.is_set():
                    found = await CallStore(reader).calls("s")
                    assert found == calls[: len(found)]
                    seen.append(len(found))
                    await asyncio.sleep(0)

        async def write() -> None:
            for start in range(0, 30, 3):
                await store.import_calls("s", calls[start : start + 3])
            done.set()

        await asyncio.gather(watch(), watch(), write())
        assert seen
        assert all(count % 3 == 0 for count in seen)  # a page of three is there or not


async def test_reading_only(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with pytest.raises(StoreError, match="no run database"):
        Database.read_only(path)
    async with Database.open(path) as database:
        await CallStore(database).import_calls("s", [call()])
    async with Database.read_only(path) as reader:
        assert await CallStore(reader).calls("s") == [call()]
        with pytest.raises(StoreError, match="reading only"):
            await CallStore(reader).seal_session("s", 1.0)
        with pytest.raises(StoreError):
            await reader.read(lambda connection: connection.execute("DELETE FROM calls"))
    with pytest.raises(StoreError, match="closed"):
        await CallStore(reader).calls("s")


@contextmanager
def a_folder_that_we_may_only_read() -> Generator[Path]:
    """Its files can be put in place before `chmod`; from there on we are nobody, if we were root."""
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    root = os.geteuid() == 0
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def protect(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


async def test_a_closed_run_is_read_in_a_folder_that_cannot_be_written() -> None:
    with a_folder_that_we_may_only_read() as folder:
        path = folder / "run.sqlite"
        await filled(path)
        protect(folder)
        with pytest.raises(OSError, match="denied"):
            (folder / "new").touch()
        async with Database.read_only(path) as reader:
            assert len(await CallStore(reader).calls("s")) == 20


async def test_a_run_with_a_log_is_not_read_without_it() -> None:
    with a_folder_that_we_may_only_read() as folder:
        path = folder / "run.sqlite"
        async with Database.open(folder / "live.sqlite") as database:
            await CallStore(database).import_calls("s", [call()])
            for end in ("", "-wal"):
                shutil.copyfile(folder / f"live.sqlite{end}", f"{path}{end}")
        assert Path(f"{path}-wal").stat().st_size > 0
        protect(folder)
        with pytest.raises(StoreError, match=r"the folder must be writable to read a run that was not closed; copy it"):
            Database.read_only(path)


async def test_many_waiting_writes_share_transactions_and_fail_alone(database: Database) -> None:
    store = CallStore(database)
    started = threading.Event()
    go = threading.Event()

    def hold(_: sqlite3.Connection) -> None:
        started.set()
        assert go.wait(10)

    def commits(connection: sqlite3.Connection) -> int:
        return connection.execute("PRAGMA data_version").fetchone()[0]

    held = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(started.wait, 10)
    writes = [asyncio.create_task(store.begin(intent(call(index)))) for index in range(50)]
    twice = asyncio.create_task(store.begin(intent(call(7))))
    await asyncio.sleep(0.05)
    # The reader's data_version moves by one per commit that it did not make itself.
    before = await database.read(commits)
    go.set()
    await held
    await asyncio.gather(*writes)
    with pytest.raises(StoreError, match="recorded already"):
        await twice
    assert len(await store.calls("s")) == 50
    assert await database.read(commits) - before <= 2


async def test_a_cancelled_waiter_does_not_cancel_the_write(database: Database) -> None:
    store = CallStore(database)
    task = asyncio.create_task(store.begin(intent(call())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()
    assert len(await store.calls("s")) == 1


async def test_a_programming_error_reaches_its_caller_and_rolls_back(database: Database) -> None:
    def work(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO stored_values VALUES ('a', '1')")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.write(work)
    assert await RunStore(database).value("a") is None


async def test_closing_finishes_what_waits_and_is_idempotent(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "run.sqlite")
    tasks = [asyncio.create_task(CallStore(database).begin(intent(call(index)))) for index in range(20)]
    await asyncio.sleep(0)
    await database.close()
    await database.close()
    await asyncio.gather(*tasks)
    assert not (tmp_path / "run.sqlite-wal").exists()
    with pytest.raises(StoreError, match="closed"):
        await CallStore(database).begin(intent(call(99)))


# -- damage, full disk, versions


async def test_other_versions_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with Database.open(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for opening in (Database.open, Database.read_only):
        with pytest.raises(StoreError, match=r"schema version 99.*new run folder"):
            opening(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    for opening in (Database.open, Database.read_only):
        with pytest.raises(StoreError, match="not a run database"):
            opening(other)
    with pytest.raises(StoreError, match="Does its folder exist"):
        Database.open(tmp_path / "missing" / "run.sqlite")


async def filled(path: Path) -> None:
    async with Database.open(path) as database:
        await CallStore(database).import_calls("s", long_session(20))


async def test_a_truncated_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    await filled(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreError, match=r"damaged.*recover"):
        async with Database.open(path) as database:
            await CallStore(database).calls("s")


async def test_a_file_of_something_else_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.write_text("{}" * 1000)
    with pytest.raises(StoreError, match=r"no SQLite database.*recover"):
        Database.open(path)
    with pytest.raises(StoreError, match="no SQLite database"):
        Database.read_only(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE calls SET detail = '{' WHERE idx = 5", "call s-c5 cannot be read"),
        ("UPDATE calls SET detail = CAST('{' AS BLOB) WHERE idx = 5", "record of call s-c5 does not match its digest"),
        ("UPDATE calls SET new_ids = substr(new_ids, 1, 5) WHERE idx = 5", "does not match its digest"),
        ("UPDATE calls SET common = common - 1 WHERE idx = 5", "does not match its digest"),
        ("UPDATE calls SET sampled_ids = x'4901020304' WHERE idx = 19", "does not match its digest"),
        ("UPDATE calls SET logprobs = NULL WHERE idx = 5", "does not match its digest"),
        ("UPDATE calls SET logprobs = x'01' WHERE idx = 5", "does not match its digest"),
        ("UPDATE calls SET new_origins = '[' WHERE idx = 5", "origins of call s-c5"),
        ("UPDATE content SET data = CAST(data || 'x' AS BLOB) WHERE id = 5", "missing or altered"),
        ("DELETE FROM chain WHERE id = 3", "list node 3 is missing"),
    ],
)
async def test_a_damaged_row_is_an_error_that_names_it(tmp_path: Path, damage: str, message: str) -> None:
    path = tmp_path / "run.sqlite"
    await filled(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute(damage).rowcount == 1
    connection.close()
    async with Database.open(path) as database:
        with pytest.raises(StoreError, match=message):
            await CallStore(database).calls("s")


async def test_a_full_disk_writes_nothing_half(database: Database) -> None:
    calls, runs = CallStore(database), RunStore(database)
    await calls.begin(intent(call(0)))
    await runs.put_run("run", "digest")
    await runs.plan([rollout()])

    def limit(connection: sqlite3.Connection) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    await database.write(limit)
    big = call(1, request={"text": "x" * 100_000})
    with pytest.raises(StoreError, match="the disk is full"):
        await calls.begin(intent(big))
    assert [one.index for one in await calls.calls("s")] == [0]
    assert await database.read(
        lambda connection: connection.execute("SELECT count(*) FROM content WHERE length(data) > 9999").fetchone()
    ) == (0,)
    await runs.begin_attempt(attempt())  # what fits still goes
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000").fetchone())
    await calls.begin(intent(big))
    assert await calls.calls("s") == [intent(call(0)), intent(big)]


async def test_a_kill_while_the_tables_are_made_leaves_a_file_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.touch()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    async with Database.open(path) as database:
        await CallStore(database).begin(intent(call()))
        assert await CallStore(database).calls("s") == [intent(call())]
