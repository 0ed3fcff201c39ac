"""`openforgerl replay`: a recorded rollout's harness once more, against the answers that it got then."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from openforgerl.cli.configs import Chosen, config_options, resolve
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.models import open_renderer
from openforgerl.cli.progress import plain
from openforgerl.config import RoomsConfig
from openforgerl.demo.bundle import bundled_tasks
from openforgerl.engines.opening import open_engine
from openforgerl.engines.recorded import RecordedEngine
from openforgerl.errors import ConfigError, InputError
from openforgerl.orchestrator import Recording, RunOptions
from openforgerl.orchestrator.assembly import (
    CONFIG_FILE,
    TOKENIZER,
    RunFolder,
    check_rooms,
    keep_tokenizer,
    open_house,
    open_run,
    read_run,
)
from openforgerl.protocols import InferenceEngine, Renderer
from openforgerl.proxy.sessions import CallLog
from openforgerl.store import CallStore, RunStore
from openforgerl.tasks import read_tasks
from openforgerl.trajectory.replaying import Record, Replay, ReplayedCall, compare_sessions
from openforgerl.types import (
    Attempt,
    Failure,
    JsonValue,
    ModelCall,
    Outcome,
    Rollout,
    Sampling,
    Session,
    Source,
    Task,
    Verdict,
)

CONTEXT_LENGTH = 32768
"""Told to the harness when neither the record nor the config knows what it was told then."""


class ReplayConfig(RoomsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`openforgerl replay`: the rooms of the recorded run, with what `-s` changes."""

    run: RunOptions = RunOptions(concurrency=1, refill_limit=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """What is replayed."""

    attempt: Attempt
    rollout: Rollout
    calls: Sequence[ModelCall]
    sampling: Sampling
    """The session's."""

    @property
    def model_name(self) -> str:
        """What the harness called the model."""
        asked = self.calls[0].request
        named: JsonValue = asked.get("model") if isinstance(asked, dict) else None
        return str(self.attempt.harness.get("model") or named or "policy")


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `--json` prints."""

    attempt_id: str
    replay: Replay
    outcome_then: Outcome | None
    outcome_now: Outcome | None
    notes: tuple[str, ...]
    """What else is not as it was: the task, the harness's package."""


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("rollout", metavar="ROLLOUT")
@click.option(
    "--fork", type=click.IntRange(0), metavar="N", help="Answer the first N calls from the record, the others live."
)
@click.option("--seed", type=click.IntRange(0), help="Of live answers.  [default: the recorded session's]")
@click.option("--run", "kept", type=click.Path(path_type=Path), help="Keep the new attempt in this run folder.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
@config_options
def replay(
    folder: Path, rollout: str, fork: int | None, seed: int | None, kept: Path | None, as_json: bool, chosen: Chosen
) -> None:
    """Run a rollout's harness again against its recorded answers, and say where its requests differ.

    ROLLOUT is a rollout of RUN (its last attempt counts) or one of its attempts. Sandbox, harness and limits are those
    of RUN's config with what -c and -s change. With --fork the config's engine goes on from call N: try another
    model on the same beginning. Exit code 0: every request is as recorded; 1: something differs.
    """
    recorded = asyncio.run(_read(folder, rollout))
    if fork is not None and fork > len(recorded.calls):
        raise InputError(f"--fork {fork}: the record has {len(recorded.calls)} calls, so it is at most that")
    tree = _recorded_config(folder)
    tree["harness"] = {**tree.get("harness", {}), "name": recorded.rollout.harness}
    known = {field.name for field in msgspec.structs.fields(RoomsConfig)} - {"mix"}
    config = resolve(ReplayConfig, chosen, base={name: value for name, value in tree.items() if name in known})
    if config is None:
        return
    if not config.tasks.path and "demo" in tree:
        tasks = msgspec.structs.replace(config.tasks, path=str(bundled_tasks()))
        config = msgspec.structs.replace(config, tasks=tasks)
    with contextlib.ExitStack() as stack:
        place = kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openforgerl-replay-")))
        report = run_until_interrupted(_replay(folder, recorded, config, place, fork, seed), "Nothing is kept of it.")
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _print(report, kept)
    if report.replay.diverged:
        sys.exit(1)


def _recorded_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        tree: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{file} cannot be read, so the rollout's surroundings are not known: {error}") from error
    # A replay may run beside the run: it takes no fixed address and no file of it.
    tree["proxy"] = {
        name: value
        for name, value in tree.get("proxy", {}).items()
        if name not in ("port", "control_port", "control_token_file", "unix_socket", "public_url")
    }
    return tree


async def _replay(
    folder: Path, recorded: Recorded, config: ReplayConfig, place: Path, fork: int | None, seed: int | None
) -> ReplayReport:
    task = _task(config, recorded.rollout)
    check_rooms(config)
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_dir():
        raise InputError(f"{folder} keeps no tokenizer, so its answers cannot be given again")
    renderer = open_renderer(tokenizer, config.proxy)
    async with contextlib.AsyncExitStack() as stack:
        engine = RecordedEngine(
            Record(recorded.calls),
            model_name=recorded.model_name,
            context_length=_context_length(recorded.attempt, config),
            live=None if fork is None else _live(config, renderer),
            fork=fork or 0,
        )
        stack.push_async_callback(engine.close)
        opened = await stack.enter_async_context(open_run(place, config))
        if any(attempt.rollout_id == recorded.rollout.rollout_id for attempt in await opened.store.attempts()):
            raise InputError(f"{place} holds a replay of this rollout already; name another --run, or remove it")
        keep_tokenizer(place, tokenizer)
        attempt = await _attempt(opened, config, engine, renderer, task, recorded, seed)
        now = await opened.store.calls(attempt.attempt_id)
    return ReplayReport(
        attempt_id=recorded.attempt.attempt_id,
        replay=compare_sessions(recorded.calls, now, fork=fork),
        outcome_then=recorded.attempt.outcome,
        outcome_now=attempt.outcome,
        notes=tuple(_notes(recorded, task, attempt)),
    )


async def _attempt(
    folder: RunFolder,
    config: ReplayConfig,
    engine: RecordedEngine,
    renderer: Renderer,
    task: Task,
    recorded: Recorded,
    seed: int | None,
) -> Attempt:
    """One attempt of the recorded rollout in fresh surroundings.

    Its tokens are of source `import`: recorded log-probs under prompts of today are nobody's to train on by RL.
    """
    drawn = seed if seed is not None else recorded.sampling.seed
    rollout = msgspec.structs.replace(
        recorded.rollout,
        run_id=folder.run_id,
        group_id=f"replay-{recorded.rollout.group_id}",
        index=0,
        seed=recorded.rollout.seed if drawn is None else drawn,
        purpose="replay",
        harness=config.harness.name,
        task_digest=task.digest,
    )
    told = dataclasses.replace(folder, calls=_Told(folder.calls, engine.asked))
    async with open_house(
        told,
        config,
        config.run,
        engine=engine,
        renderer=renderer,
        tasks={task.name: task},
        on_attempt=lambda rollout, attempt: None,
    ) as house:
        recording = Recording(Source.IMPORT, recorded.sampling)
        results = [result async for result in house.orchestrator.run([[rollout]], recording)]
    return results[0].attempts[0]


class _Told:
    """A call log that tells of every call before it is answered."""

    def __init__(self, log: CallLog, tell: Callable[[ModelCall], None]) -> None:
        self._log = log
        self._tell = tell

    async def put_session(self, session: Session) -> None:
        await self._log.put_session(session)

    async def seal_session(self, session_id: str, at: float) -> None:
        await self._log.seal_session(session_id, at)

    async def sessions(self) -> Sequence[Session]:
        return await self._log.sessions()

    async def put_images(self, images: Mapping[str, bytes]) -> None:
        await self._log.put_images(images)

    async def images(self, names: Collection[str]) -> Mapping[str, bytes]:
        return await self._log.images(names)

    async def begin(self, call: ModelCall) -> None:
        self._tell(call)
        await self._log.begin(call)

    async def finish(self, call: ModelCall) -> None:
        await self._log.finish(call)

    async def calls(self, session_id: str, after: int = -1, limit: int | None = None) -> Sequence[ModelCall]:
        return await self._log.calls(session_id, after, limit)


async def _read(folder: Path, name: str) -> Recorded:
    database = read_run(folder)
    try:
        store, calls = RunStore(database), CallStore(database)
        attempts = await store.attempts()
        fitting = [attempt for attempt in attempts if name in (attempt.attempt_id, attempt.rollout_id)]
        if not fitting:
            raise InputError(f"{folder} has no rollout or attempt {name!r}; list them: openforgerl show {folder}")
        attempt = fitting[-1]
        rollout = {rollout.rollout_id: rollout for rollout in await store.rollouts()}[attempt.rollout_id]
        found = await calls.calls(attempt.attempt_id)
        if not found:
            raise InputError(f"attempt {attempt.attempt_id} made no model call: there is nothing to replay")
        sessions = {session.session_id: session for session in await calls.sessions()}
        session = sessions.get(attempt.attempt_id)
        return Recorded(attempt, rollout, found, Sampling() if session is None else session.sampling)
    finally:
        await database.close()


def _task(config: ReplayConfig, rollout: Rollout) -> Task:
    if not config.tasks.path:
        raise ConfigError(f"where is task {rollout.task}? RUN's config names no tasks: give -s tasks.path=DIR")
    for task in read_tasks(Path(config.tasks.path)):
        if task.name == rollout.task:
            return task
    raise ConfigError(f"{config.tasks.path} has no task {rollout.task!r} any more: give -s tasks.path=DIR")


def _context_length(attempt: Attempt, config: ReplayConfig) -> int:
    told = attempt.harness.get("context_length")
    return told if isinstance(told, int) else config.engine.context_length or CONTEXT_LENGTH


def _live(config: ReplayConfig, renderer: Renderer) -> InferenceEngine:
    engine = open_engine(None, renderer, config.engine)
    if not isinstance(engine, InferenceEngine):
        raise ConfigError(f"engine {config.engine.kind} answers in text, so it cannot go on from recorded ids")
    return engine


def _notes(recorded: Recorded, task: Task, attempt: Attempt) -> list[str]:
    notes: list[str] = []
    if task.digest != recorded.rollout.task_digest:
        notes.append(
            f"task {task.name} is not as it was: digest {recorded.rollout.task_digest[:12]}, now {task.digest[:12]}"
        )
    for name in ("version", "package_digest"):
        then, now = recorded.attempt.harness.get(name), attempt.harness.get(name)
        if then != now:
            notes.append(f"the harness's {name} was {then}, now {now}")
    return notes


def _print(report: ReplayReport, kept: Path | None) -> None:
    replayed = report.replay
    for call in replayed.calls:
        click.echo(plain(_line(call)))
    for call_id in replayed.not_asked:
        click.echo(f"not asked again: call {call_id} of the record")
    for note in report.notes:
        click.echo(plain(f"note: {note}"))
    click.echo(plain(f"outcome: {_said(report.outcome_now)}; recorded: {_said(report.outcome_then)}"))
    differing = sum(call.state in ("diverged", "not_in_record") for call in replayed.calls) + len(replayed.not_asked)
    compared = sum(call.state != "live" for call in replayed.calls)
    said = f"{differing} differ" if differing else "all as recorded"
    click.echo(f"{report.attempt_id}: {len(replayed.calls)} calls, {compared} compared with the record: {said}")
    if kept is not None:
        click.echo(f"Look closer: openforgerl show {kept}")


def _line(call: ReplayedCall) -> str:
    head = f"call {call.index:<3} {call.thread}"
    found = call.difference
    if found is not None:
        return f"{head}: differs at {found.where} ({found.cause}): {found.before!r} became {found.now!r}"
    words = {"live": "answered live", "not_in_record": "not in the record"}.get(call.state, "same")
    return f"{head}: {words}" + (", but other prompt ids (template, its clock or tokenizer)" if call.other_ids else "")


def _said(outcome: Outcome | None) -> str:
    if isinstance(outcome, Verdict):
        return f"reward {outcome.reward:g} ({outcome.ending})"
    return f"{outcome.origin} failure: {outcome.kind}" if isinstance(outcome, Failure) else "unfinished"
