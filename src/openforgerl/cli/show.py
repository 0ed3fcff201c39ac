"""`openforgerl show`: a run's attempts, or one attempt's conversation with every token's fate."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from openforgerl.cli.progress import cell, open_console, plain
from openforgerl.errors import InputError, StoreError
from openforgerl.orchestrator.assembly import TOKENIZER, read_run
from openforgerl.protocols import Renderer
from openforgerl.proxy.samples import session_samples
from openforgerl.rendering import load_renderer
from openforgerl.rendering.images import size_of
from openforgerl.store import CallStore, RunStore
from openforgerl.trajectory import Mark, annotate
from openforgerl.types import Attempt, Failure, ModelCall, PlacedImage, Rollout, SampleSet, Session, Verdict

STYLES = {"context": "dim", "trained": "bold green", "masked": "yellow"}
BRACKETS = {"context": ("", ""), "trained": ("⟦", "⟧"), "masked": ("⟨", "⟩")}
"""Marks for readers without colours (a file, a pipe)."""


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("attempt", required=False)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Default: the one kept in RUN."
)
@click.option("--failed", is_flag=True, help="List only attempts without a verdict.")
@click.option(
    "--limit", type=click.IntRange(1), default=40, show_default=True, help="List so many attempts, latest last."
)
def show(folder: Path, attempt: str | None, tokenizer: Path | None, failed: bool, limit: int) -> None:
    """Show RUN: a summary and its attempts; or ATTEMPT's conversation with trained, masked and context tokens marked.

    In the folder of `openforgerl proxy`, where there are no attempts, sessions take their place.

    Trained tokens are green in ⟦ ⟧, masked ones yellow in ⟨reason: ⟩, context is dim. Works beside a running run.
    """
    console = open_console()
    if attempt is None:
        asyncio.run(_list(folder, failed, limit, console))
        return
    directory = tokenizer or folder / TOKENIZER
    if not directory.is_dir():
        raise InputError(f"{folder} keeps no tokenizer; give --tokenizer DIR")
    asyncio.run(_attempt(folder, attempt, load_renderer(directory), console))


async def _list(folder: Path, failed: bool, limit: int, console: Console) -> None:
    database = read_run(folder)
    try:
        store = RunStore(database)
        attempts = await store.attempts()
        rollouts = {rollout.rollout_id: rollout for rollout in await store.rollouts()}
        sessions = [] if attempts else await _counted(CallStore(database))
    finally:
        await database.close()
    if not attempts:
        _sessions(sessions, limit, console)
        return
    _summary(attempts, rollouts, console)
    wanted = [attempt for attempt in attempts if not failed or isinstance(attempt.outcome, Failure)]
    chosen = wanted[-limit:]
    table = Table()
    for column in ("attempt", "task", "outcome", "seconds"):
        table.add_column(column, overflow="fold")
    for attempt in chosen:
        seconds = "" if attempt.finished_at is None else f"{attempt.finished_at - attempt.started_at:.1f}"
        words = (attempt.attempt_id, rollouts[attempt.rollout_id].task, _outcome(attempt), seconds)
        table.add_row(*map(cell, words))
    console.print(table)
    if any(attempt.outcome is None for attempt in chosen):
        console.print("unfinished: running now, or stopped in the middle; the run's own command resumes it")
    if len(wanted) > len(chosen):
        console.print(f"{len(chosen)} of {len(wanted)} attempts shown; --limit N shows more", highlight=False)


def _summary(attempts: list[Attempt], rollouts: dict[str, Rollout], console: Console) -> None:
    table = Table("purpose", "attempts", "solved", "graded", "failures by origin")
    for purpose in dict.fromkeys(rollout.purpose for rollout in rollouts.values()):
        found = [attempt for attempt in attempts if rollouts[attempt.rollout_id].purpose == purpose]
        verdicts = [attempt.outcome for attempt in found if isinstance(attempt.outcome, Verdict)]
        origins = Counter(attempt.outcome.origin.value for attempt in found if isinstance(attempt.outcome, Failure))
        failures = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
        solved = sum(verdict.passed for verdict in verdicts)
        table.add_row(*map(cell, (purpose, str(len(found)), str(solved), str(len(verdicts)), failures)))
    console.print(table)
    broken: Counter[str] = Counter()
    for attempt in attempts:
        broken.update(attempt.harness.get("prefix_breaks", {}))
    if broken:
        causes = ", ".join(f"{count} {cause}" for cause, count in broken.most_common())
        console.print(
            plain(f"prefixes broken: {causes}; `openforgerl audit` shows where"), highlight=False, markup=False
        )


async def _counted(store: CallStore) -> list[tuple[Session, int]]:
    """Every session with the number of its calls."""
    return [(session, len(await store.calls(session.session_id))) for session in await store.sessions()]


def _sessions(found: Sequence[tuple[Session, int]], limit: int, console: Console) -> None:
    """What a proxy recorded for programs that no run of ours started."""
    table = Table("session", "state", "calls", "opened")
    for session, calls in found[-limit:]:
        opened = datetime.fromtimestamp(session.opened_at, UTC).isoformat(" ", "seconds")
        table.add_row(*map(cell, (session.session_id, session.state.value, str(calls), opened)))
    console.print(table)
    if len(found) > limit:
        console.print(f"{limit} of {len(found)} sessions shown; --limit N shows more", highlight=False)


async def _attempt(folder: Path, attempt_id: str, renderer: Renderer, console: Console) -> None:
    database = read_run(folder)
    try:
        store = RunStore(database)
        found = {attempt.attempt_id: attempt for attempt in await store.attempts()}
        attempt = found.get(attempt_id)
        session = None if attempt else await _session(CallStore(database), attempt_id)
        if attempt is None and session is None:
            raise InputError(f"{folder} has no attempt {attempt_id!r}; list them: openforgerl show {folder}")
        calls = await CallStore(database).calls(attempt_id)
        pictures = await _pictures(calls, CallStore(database))
        samples = (await store.samples([attempt_id])).get(attempt_id)
    finally:
        await database.close()
    if attempt is not None:
        _header(attempt, console)
    _calls(calls, console)
    if session is not None:
        samples = session_samples(session, calls)
    if samples is None:
        console.print("This attempt made no samples (it has no verdict). Its calls:", highlight=False)
        for call in calls:
            prompt = _decoded(call.prompt.ids, 0, call.prompt.images, pictures, renderer)
            console.print(Text(plain(prompt), style=STYLES["context"]), end="")
            console.print(Text(plain(renderer.decode(call.sampled_ids)), style=STYLES["masked"]))
        return
    _samples(samples, pictures, renderer, console)


async def _session(store: CallStore, session_id: str) -> Session | None:
    return next((session for session in await store.sessions() if session.session_id == session_id), None)


async def _pictures(calls: Sequence[ModelCall], store: CallStore) -> dict[str, str]:
    """How each image of these calls is printed, by its sha256: its placeholders would fill pages."""
    pictures: dict[str, str] = {}
    for name in {image.sha256 for call in calls for image in call.prompt.images}:
        try:
            width, height = size_of((await store.images([name]))[name])
            size = f"{width}x{height}"
        except StoreError:  # calls copied from another database come without their images
            size = "(missing or damaged)"
        pictures[name] = f"⟨image {size} {name[:12]}⟩"
    return pictures


def _decoded(
    ids: Sequence[int], start: int, images: Sequence[PlacedImage], pictures: Mapping[str, str], renderer: Renderer
) -> str:
    """Text of the ids at `start` of a row or prompt; `images` are those of the whole."""
    text, at = "", 0
    for image in images:
        low = image.start - start
        if 0 <= low < len(ids):
            text += renderer.decode(ids[at:low]) + pictures[image.sha256]
            at = low + image.count
    return text + renderer.decode(ids[at:])


def _samples(found: SampleSet, pictures: Mapping[str, str], renderer: Renderer, console: Console) -> None:
    for sample in found.samples:
        console.rule(cell(f"{sample.sample_id}: {len(sample.ids)} ids, {sample.trained_tokens} trained"))
        text = Text()
        for mark in annotate(sample):
            said = _decoded(mark.ids, mark.start, sample.images, pictures, renderer)
            text.append_text(_marked(mark, said))
        console.print(text, soft_wrap=True)
    totals = found.totals
    console.rule("every sampled token, once")
    parts = [f"sampled {totals.sampled}", f"trained {totals.trained}"]
    parts += [f"masked {count} ({reason})" for reason, count in totals.masked.items()]
    parts += [f"dropped {count} ({reason})" for reason, count in totals.dropped.items()]
    console.print("  ".join(parts), highlight=False)


def _marked(mark: Mark, said: str) -> Text:
    opening, closing = BRACKETS[mark.state]
    reason = f"{mark.reason}: " if mark.reason else ""
    return Text(f"{opening}{reason}{plain(said)}{closing}", style=STYLES[mark.state])


def _header(attempt: Attempt, console: Console) -> None:
    console.print(plain(f"{attempt.attempt_id}: {_outcome(attempt)}"), highlight=False, markup=False, style="bold")
    outcome = attempt.outcome
    if isinstance(outcome, Failure):
        console.print(plain(f"  stage {outcome.stage}, {outcome.message}"), highlight=False, markup=False)
    for name in ("argv", "exit", "user_agents", "package_digest", "ending"):
        if name in attempt.harness:
            console.print(plain(f"  {name:<14} {attempt.harness[name]}"), highlight=False, markup=False, soft_wrap=True)
    for name, value in (*attempt.provenance.items(), *attempt.sandbox.items(), ("seconds", attempt.timings)):
        console.print(plain(f"  {name:<14} {value}"), highlight=False, markup=False, soft_wrap=True)


def _calls(calls: Sequence[ModelCall], console: Console) -> None:
    for call in calls:
        said = f"{len(call.prompt.ids)} prompt ids, {len(call.sampled_ids)} sampled, weights {call.weights_version}"
        line = f"  call {call.index:<9} {call.role} ({call.role_evidence}), {call.status}, {said}"
        console.print(line, highlight=False, markup=False)


def _outcome(attempt: Attempt) -> str:
    outcome = attempt.outcome
    if outcome is None:
        return "unfinished"
    if isinstance(outcome, Verdict):
        return f"reward {outcome.reward:g} ({'solved' if outcome.passed else 'not solved'}, {outcome.ending})"
    return f"{outcome.origin} failure: {outcome.kind}"
