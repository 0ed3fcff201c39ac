"""The run: plan, attempts, outcomes, samples, steps. What the orchestrator and the trainer record."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from openforgerl.errors import AlreadyCommitted, StoreError
from openforgerl.store.call_rows import CallReader, RecentPrompts, import_calls
from openforgerl.store.database import Database
from openforgerl.store.sample_rows import insert_samples, read_samples
from openforgerl.types import Attempt, JsonValue, ModelCall, Rollout, SampleSet, Verdict

V = TypeVar("V")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step that is done: its checkpoint is on disk and its attempts are used up."""

    stage: str
    step: int
    weights_version: int
    checkpoint: str
    """Path of the checkpoint, relative to the run folder."""
    metrics: dict[str, JsonValue]
    attempt_ids: tuple[str, ...]
    """Attempts trained on in this step, in order."""


class RunStore:
    """Plan and progress of runs in a run database. Every method that changes something returns after COMMIT."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recent = RecentPrompts()

    async def put_run(self, run_id: str, config_digest: str, config: JsonValue = None) -> None:
        """Record a run; the same again is nothing (resume).

        StoreError when the run exists with another configuration.
        """

        def work(connection: sqlite3.Connection) -> None:
            row = connection.execute("SELECT config_digest FROM runs WHERE run_id = ?", (run_id,)).fetchone()
            if row is None:
                connection.execute(
                    "INSERT INTO runs (run_id, config_digest, record) VALUES (?, ?, ?)",
                    (run_id, config_digest, _encode(config)),
                )
            elif row[0] != config_digest:
                raise StoreError(
                    f"run {run_id} was started with another configuration (digest {row[0][:12]}, now "
                    f"{config_digest[:12]}). Use the same configuration to resume, or a new run folder"
                )

        await self._database.write(work)

    async def runs(self) -> dict[str, JsonValue]:
        """run_id → the configuration it was recorded with."""
        rows = await self._database.read(
            lambda connection: connection.execute("SELECT run_id, record FROM runs ORDER BY rowid").fetchall()
        )
        return {run_id: _decode(record, object, f"run {run_id}") for run_id, record in rows}

    async def plan(self, rollouts: Sequence[Rollout]) -> None:
        """Add places to the plan; ones that are there already stay. StoreError when one differs from the plan."""
        await self._database.write(lambda connection: _plan(connection, rollouts))

    async def rollouts(self, purpose: str | None = None, step: int | None = None) -> list[Rollout]:
        """The plan, in order of planning; only those of a purpose, of a step."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT rollout_id, record FROM rollouts WHERE (?1 IS NULL OR purpose = ?1) "
                "AND (?2 IS NULL OR step = ?2) ORDER BY position",
                (purpose, step),
            ).fetchall()
        )
        return [_decode(record, Rollout, f"rollout {rollout_id}") for rollout_id, record in rows]

    async def begin_attempt(self, attempt: Attempt) -> None:
        """Record that an attempt starts. StoreError when its rollout is not planned or its number is taken."""

        def work(connection: sqlite3.Connection) -> None:
            if attempt.outcome is not None:
                raise StoreError(f"attempt {attempt.attempt_id} cannot begin with an outcome")
            if not _exists(connection, "rollouts", "rollout_id", attempt.rollout_id):
                raise StoreError(f"attempt {attempt.attempt_id}: rollout {attempt.rollout_id} is not planned")
            try:
                connection.execute(
                    "INSERT INTO attempts (attempt_id, rollout_id, number, record) VALUES (?, ?, ?, ?)",
                    (attempt.attempt_id, attempt.rollout_id, attempt.number, _encode(attempt)),
                )
            except sqlite3.IntegrityError as error:
                raise StoreError(
                    f"attempt {attempt.attempt_id} (number {attempt.number} of {attempt.rollout_id}) was begun already"
                ) from error

        await self._database.write(work)

    async def note(self, attempt: Attempt) -> None:
        """Keep what an unfinished attempt has gathered, so that a restart can go on with it. StoreError otherwise."""

        def work(connection: sqlite3.Connection) -> None:
            changed = connection.execute(
                "UPDATE attempts SET record = ? WHERE attempt_id = ? AND outcome IS NULL",
                (_encode(attempt), attempt.attempt_id),
            ).rowcount
            if not changed or attempt.outcome is not None:
                raise StoreError(f"attempt {attempt.attempt_id} is not under way: nothing can be noted of it")

        await self._database.write(work)

    async def commit(self, attempt: Attempt, samples: SampleSet | None = None) -> None:
        """Finish an attempt: outcome and samples in one transaction, or nothing.

        Raises AlreadyCommitted when it has an outcome (the first one stands); StoreError when it was never begun.
        """
        await self._database.write(lambda connection: _commit(connection, attempt, samples))

    async def attempts(self, rollout_id: str | None = None) -> list[Attempt]:
        """Attempts in order of beginning; only those of a rollout."""
        return await self._database.read(
            lambda connection: _attempts(connection, "?1 IS NULL OR rollout_id = ?1", (rollout_id,))
        )

    async def unfinished(self) -> list[Attempt]:
        """Attempts that were begun and have no outcome: to adopt or to reap after a restart."""
        return await self._database.read(lambda connection: _attempts(connection, "outcome IS NULL", ()))

    async def samples(self, attempt_ids: Sequence[str]) -> dict[str, SampleSet]:
        """Attempt id → its samples; attempts committed without samples are left out."""
        return await self._database.read(lambda connection: read_samples(connection, attempt_ids))

    async def record_step(
        self,
        stage: str,
        step: int,
        version: int,
        checkpoint: str,
        metrics: Mapping[str, JsonValue],
        attempt_ids: Sequence[str],
    ) -> None:
        """Record an optimizer step and use up its attempts for this stage, in one transaction.

        Raises AlreadyCommitted when the step is recorded or an attempt trained in this stage before; StoreError
        when the step does not come after the last one, or an attempt has no verdict. A metric that is NaN or
        infinite is kept as null.
        """
        record = StepRecord(
            stage=stage,
            step=step,
            weights_version=version,
            checkpoint=checkpoint,
            metrics=dict(metrics),
            attempt_ids=tuple(attempt_ids),
        )
        await self._database.write(lambda connection: _record_step(connection, record))

    async def steps(self, stage: str) -> list[StepRecord]:
        """Recorded steps of a stage, first to last."""
        return await self._database.read(lambda connection: _steps(connection, stage))

    async def put_value(self, key: str, value: JsonValue) -> None:
        """Keep a JSON value under a name (a stage's result); a new one replaces it. NaN becomes null."""
        await self._database.write(
            lambda connection: (
                connection.execute(
                    "INSERT INTO stored_values (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2",
                    (key, _encode(value)),
                ).rowcount
            )
        )

    async def value(self, key: str) -> JsonValue:
        """The value kept under a name, or None."""
        row = await self._database.read(
            lambda connection: connection.execute("SELECT value FROM stored_values WHERE key = ?", (key,)).fetchone()
        )
        return None if row is None else _decode(row[0], object, f"value {key!r}")

    async def import_calls(self, session_id: str, calls: Sequence[ModelCall]) -> None:
        """Copy a session's calls from the proxy that recorded them; see `CallStore.import_calls`."""
        await self._database.write(lambda connection: import_calls(connection, session_id, calls, self._recent))

    async def calls(self, session_id: str) -> list[ModelCall]:
        """All calls of a session (= attempt) that are here, in order of arrival."""
        return await self._database.read(lambda connection: CallReader(connection).session(session_id, -1, None))


def _plan(connection: sqlite3.Connection, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        row = connection.execute("SELECT record FROM rollouts WHERE rollout_id = ?", (rollout.rollout_id,)).fetchone()
        if row is not None:
            if _decode(row[0], Rollout, f"rollout {rollout.rollout_id}") != rollout:
                raise StoreError(f"rollout {rollout.rollout_id} is planned differently already; ids must be unique")
            continue
        if not _exists(connection, "runs", "run_id", rollout.run_id):
            raise StoreError(f"rollout {rollout.rollout_id}: run {rollout.run_id} is not recorded; call put_run first")
        connection.execute(
            "INSERT INTO rollouts (rollout_id, run_id, purpose, step, record) VALUES (?, ?, ?, ?, ?)",
            (rollout.rollout_id, rollout.run_id, rollout.purpose, rollout.step, _encode(rollout)),
        )


def _commit(connection: sqlite3.Connection, attempt: Attempt, samples: SampleSet | None) -> None:
    if attempt.outcome is None:
        raise StoreError(f"attempt {attempt.attempt_id} cannot be committed without an outcome")
    row = connection.execute("SELECT outcome FROM attempts WHERE attempt_id = ?", (attempt.attempt_id,)).fetchone()
    if row is None:
        raise StoreError(f"attempt {attempt.attempt_id} was never begun")
    if row[0] is not None:
        raise AlreadyCommitted(f"attempt {attempt.attempt_id} has its outcome ({row[0]}) already; the first one stands")
    connection.execute(
        "UPDATE attempts SET outcome = ?, record = ?, totals = ? WHERE attempt_id = ?",
        (
            "verdict" if isinstance(attempt.outcome, Verdict) else "failure",
            _encode(attempt),
            None if samples is None else _encode(samples.totals),
            attempt.attempt_id,
        ),
    )
    if samples is not None:
        insert_samples(connection, attempt.attempt_id, samples)


def _attempts(connection: sqlite3.Connection, where: str, parameters: tuple[str | None, ...]) -> list[Attempt]:
    rows = connection.execute(
        f"SELECT attempt_id, record FROM attempts WHERE {where} ORDER BY position", parameters
    ).fetchall()
    return [_decode(record, Attempt, f"attempt {attempt_id}") for attempt_id, record in rows]


def _record_step(connection: sqlite3.Connection, record: StepRecord) -> None:
    stage, step = record.stage, record.step
    (last,) = connection.execute("SELECT max(step) FROM steps WHERE stage = ?", (stage,)).fetchone()
    if last is not None and step == last:
        raise AlreadyCommitted(f"step {step} of {stage} is recorded already; the first one stands")
    if last is not None and step < last:
        raise StoreError(f"step {step} of {stage} comes after step {last}, which is recorded")
    connection.execute(
        "INSERT INTO steps (stage, step, weights_version, checkpoint, metrics) VALUES (?, ?, ?, ?, ?)",
        (stage, step, record.weights_version, record.checkpoint, _encode(record.metrics)),
    )
    for position, attempt_id in enumerate(record.attempt_ids):
        row = connection.execute("SELECT outcome FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()
        if row is None or row[0] != "verdict":
            raise StoreError(f"step {step} of {stage}: attempt {attempt_id} has no verdict, so it cannot train")
        try:
            connection.execute(
                "INSERT INTO trained (attempt_id, stage, step, position) VALUES (?, ?, ?, ?)",
                (attempt_id, stage, step, position),
            )
        except sqlite3.IntegrityError as error:
            raise AlreadyCommitted(f"attempt {attempt_id} trained in {stage} before; nothing trains twice") from error


def _steps(connection: sqlite3.Connection, stage: str) -> list[StepRecord]:
    records: list[StepRecord] = []
    for step, version, checkpoint, metrics in connection.execute(
        "SELECT step, weights_version, checkpoint, metrics FROM steps WHERE stage = ? ORDER BY step", (stage,)
    ).fetchall():
        trained = connection.execute(
            "SELECT attempt_id FROM trained WHERE stage = ? AND step = ? ORDER BY position", (stage, step)
        )
        records.append(
            StepRecord(
                stage=stage,
                step=step,
                weights_version=version,
                checkpoint=checkpoint,
                metrics=_decode(metrics, dict[str, JsonValue], f"step {step} of {stage}"),
                attempt_ids=tuple(attempt_id for (attempt_id,) in trained),
            )
        )
    return records


def _exists(connection: sqlite3.Connection, table: str, column: str, value: str) -> bool:
    return connection.execute(f"SELECT 1 FROM {table} WHERE {column} = ?", (value,)).fetchone() is not None


def _encode(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise StoreError(f"not a value that can be stored as JSON: {error}") from error


def _decode(data: bytes, kind: type[V], what: str) -> V:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(f"damaged run database: {what} cannot be read ({error})") from error
