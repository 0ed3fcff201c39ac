"""`openforgerl audit`: is what would train what was sampled, and is nothing lost?"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from openforgerl import plugins
from openforgerl.errors import ConfigError, InputError
from openforgerl.formats import Selection
from openforgerl.orchestrator.assembly import TOKENIZER, read_run
from openforgerl.store import RunStore
from openforgerl.trajectory import AttemptAudit, audit_attempt, build
from openforgerl.types import JsonValue, Sample

STAGE = "rl"
"""The training stage whose checkpoints are the weights versions of rollouts of purpose `train`."""
TRAINED = "train"
SHOWN = 3
"""Examples of one cause."""


class RunAudit(msgspec.Struct, frozen=True, kw_only=True):
    """All audited attempts together."""

    attempts: tuple[AttemptAudit, ...]
    left_out: dict[str, int]
    """Attempts that were not audited: they have no verdict or no samples."""
    identical_rows: int
    """Rows whose ids are another row's of another attempt (a policy that has made up its mind; or a copy)."""
    rescored: JsonValue
    """`training.rescoring.Rescored`, or why nothing was scored."""
    findings: tuple[str, ...]
    """What must not be; the exit code is 1 when there is any."""


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Model directory of weights version 0. Default: RUN's first checkpoint, if it is kept.",
)
@click.option("--purpose", help="Only rollouts of this purpose.")
@click.option("--max-mean", type=float, default=0.001, show_default=True, help="Mean log-prob difference allowed.")
@click.option("--max-difference", type=float, default=0.05, show_default=True, help="Largest one allowed, nats.")
@click.option("--json", "as_json", is_flag=True, help="Everything, per call, as JSON.")
def audit(
    folder: Path, model: Path | None, purpose: str | None, max_mean: float, max_difference: float, as_json: bool
) -> None:
    """Check that a run's samples are what was sampled, and that every token is accounted for.

    Rollouts of purpose `train` are scored again with the kept checkpoints that sampled them, and with --model whatever
    was sampled by version 0 of the chosen purpose. Exit code 1: something is wrong, or differs by more than allowed.
    """
    found = asyncio.run(_audit(folder, model, purpose, (max_mean, max_difference)))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _print(found)
    if found.findings:
        sys.exit(1)


async def _audit(folder: Path, model: Path | None, purpose: str | None, limits: tuple[float, float]) -> RunAudit:
    database = read_run(folder)
    try:
        store = RunStore(database)
        audits: list[AttemptAudit] = []
        rows: Counter[int] = Counter()
        scored: list[Sample] = []
        temperatures: dict[str, float] = {}
        findings: list[str] = []
        selection = Selection(store, purpose=purpose)
        weights = await _weights(store, folder, model)
        added = _added_tokens(folder / TOKENIZER / "tokenizer.json")
        async for record in selection.records():
            done = audit_attempt(build(record.attempt.attempt_id, record.calls), record.samples, added=added)
            audits.append(done)
            findings += [f"{record.attempt.attempt_id}: {finding}" for finding in done.findings]
            rows.update({hash(sample.ids) for sample in record.samples.samples})
            if not done.findings and (record.rollout.purpose == TRAINED or model is not None):
                scored += record.samples.samples
                temperatures |= {call.call_id: call.sampling_applied.temperature or 1.0 for call in record.calls}
        findings += await _without_samples(store, selection)
        if not audits:
            findings.append("no attempt was audited: none has a verdict and samples")
    finally:
        await database.close()
    rescored, differing = _rescored(scored, temperatures, weights, limits, asked=model is not None)
    return RunAudit(
        attempts=tuple(audits),
        left_out=dict(sorted(selection.left_out.items())),
        identical_rows=sum(count - 1 for count in rows.values()),
        rescored=rescored,
        findings=(*findings, *differing),
    )


async def _weights(store: RunStore, folder: Path, model: Path | None) -> dict[int, Path]:
    """Weights version → directory, for all that are still there."""
    first = folder / "checkpoints" / STAGE / "step-000000"
    found = {0: first} | {step.weights_version: folder / step.checkpoint for step in await store.steps(STAGE)}
    if model is not None:
        found[0] = model
    return {version: path for version, path in found.items() if path.is_dir()}


async def _without_samples(store: RunStore, selection: Selection) -> list[str]:
    """Findings: graded attempts of which nothing would train although their calls hold sampled tokens."""
    found: list[str] = []
    for attempt_id in selection.without_samples:
        sampled = sum(len(call.sampled_ids) for call in await store.calls(attempt_id))
        if sampled:
            found.append(f"{attempt_id}: it is graded, {sampled} tokens were sampled for it, and it has no samples")
    return found


class _AddedToken(msgspec.Struct):
    content: str


class _Tokenizer(msgspec.Struct):
    """Of a `tokenizer.json`."""

    added_tokens: list[_AddedToken] = []


def _added_tokens(file: Path) -> list[str]:
    """Texts of the added tokens of the tokenizer that the run keeps; none where it keeps none."""
    if not file.is_file():
        return []
    try:
        return [token.content for token in msgspec.json.decode(file.read_bytes(), type=_Tokenizer).added_tokens]
    except (msgspec.DecodeError, OSError) as error:
        raise InputError(f"{file}: the run's tokenizer cannot be read: {error}") from error


def _rescored(
    samples: Sequence[Sample],
    temperatures: dict[str, float],
    weights: dict[int, Path],
    limits: tuple[float, float],
    *,
    asked: bool,
) -> tuple[Any, list[str]]:
    """What scoring again gave, as data, and what of it is over the limits."""
    if asked and not samples:
        return "no sound sample to score", ["nothing was scored again with --model: there is no sound sample"]
    if not samples or not weights:
        return "no weights of what these rollouts were sampled by: give --model DIR", []
    try:
        rescore: Any = plugins.load("rescoring", "torch")
    except ConfigError as error:
        if asked:
            raise
        return f"torch is not installed ({error})", []
    result = rescore(samples, temperatures=temperatures, weights=weights)
    findings = [
        f"log-probs of weights version {version.weights_version} differ by {version.mean:.2g} on average and "
        f"{version.max:.2g} at most (sample {version.worst}); allowed: {limits[0]:g} and {limits[1]:g}"
        for version in result.versions
        if not (version.mean <= limits[0] and version.max <= limits[1])
    ]
    if asked and not result.versions:
        left = "; ".join(f"{count} tokens, {reason}" for reason, count in result.unscored.items())
        findings.append(f"nothing was scored again with --model: {left}")
    return msgspec.to_builtins(result), findings


def _print(found: RunAudit) -> None:
    totals = [audited.totals for audited in found.attempts]
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for one in totals:
        masked.update(one.masked)
        dropped.update(one.dropped)
    sampled = sum(one.sampled for one in totals)
    click.echo(f"{len(found.attempts)} attempts audited" + _listed("left out", found.left_out))
    click.echo(
        f"tokens sampled {sampled}: trained {sum(one.trained for one in totals)}"
        + _listed("masked", masked)
        + _listed("dropped", dropped)
    )
    rows, ids = (sum(getattr(audited, name) for audited in found.attempts) for name in ("rows", "row_tokens"))
    retries = sum(audited.retries for audited in found.attempts)
    click.echo(f"rows {rows} of {ids} tokens, {found.identical_rows} the same as another attempt's; retries {retries}")
    off: Counter[str] = Counter()
    for audited in found.attempts:
        off.update(audited.off_policy)
    for reason, count in off.most_common():
        click.echo(f"off-policy, {reason}: {count} tokens ({count / max(sampled, 1):.1%} of those sampled)")
    _print_breaks(found)
    _print_scores(found.rescored)
    for finding in found.findings:
        click.echo(f"FINDING {finding}")
    click.echo("no finding" if not found.findings else f"{len(found.findings)} findings")


def _print_breaks(found: RunAudit) -> None:
    breaks = [(audited.attempt_id, one) for audited in found.attempts for one in audited.breaks]
    for cause, count in Counter(one.cause for _, one in breaks).most_common():
        click.echo(f"prefix broken, {cause}: {count} times, for example")
        for attempt_id, one in [pair for pair in breaks if pair[1].cause == cause][:SHOWN]:
            click.echo(f"  {attempt_id} {one.call_id} at {one.where}: {one.before!r} became {one.now!r}")
    warnings: Counter[str] = Counter()
    for audited in found.attempts:
        warnings.update(audited.warnings)
    for warning, count in warnings.most_common():
        click.echo(f"warning in {count} calls: {warning}")
    spelled = [(audited.attempt_id, one) for audited in found.attempts for one in audited.special_token_text]
    if spelled:
        click.echo(f"special token text in {len(spelled)} messages, rendered as text; for example")
        for attempt_id, one in spelled[:SHOWN]:
            click.echo(f"  {attempt_id} {one.call_id} at {one.where}: {one.token!r}")


def _print_scores(rescored: Any) -> None:
    if isinstance(rescored, str):
        click.echo(f"not scored again: {rescored}")
        return
    for version in rescored["versions"]:
        click.echo(
            f"scored again, weights version {version['weights_version']} ({version['tokens']} tokens): |difference| "
            f"mean {version['mean']:.2g}, 50 % {version['p50']:.2g}, 90 % {version['p90']:.2g}, "
            f"99 % {version['p99']:.2g}, most {version['max']:.2g}"
        )
    for reason, count in rescored["unscored"].items():
        click.echo(f"not scored again: {count} tokens, {reason}")


def _listed(title: str, counts: dict[str, int]) -> str:
    return f"; {title} " + ", ".join(f"{count} {what}" for what, count in counts.items()) if counts else ""
