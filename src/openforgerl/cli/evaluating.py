"""`openforgerl eval`: pass@1, pass@k and pass^k on tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from openforgerl.cli.configs import Chosen, EvalConfig, resolve, round_options
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.progress import open_progress
from openforgerl.cli.rounds import Round, run_round
from openforgerl.errors import OpenForgeError
from openforgerl.evals.metrics import Interval
from openforgerl.evals.summary import METRICS, StageSummary, TaskResult, compare_stages, summarise
from openforgerl.types import Failure, Verdict


@click.command(name="eval")
@round_options(folder="runs/eval")
def eval(folder: Path, flags: dict[str, Any], chosen: Chosen) -> None:
    """Measure a model on the Harbor task directory TASKS (or all tasks in it), inside a harness.

    Prints pass@1, pass@k and pass^k (k = 3, or `-s attempts=K`) with 95 % intervals over tasks and writes
    RUN/eval.json. Attempts that failed
    for reasons of ours are refilled, never counted as wrong. With --harness repeated, each harness is measured on
    every task, with the same seeds, and the others are compared with the first, task by task.
    """
    config = resolve(EvalConfig, chosen, flags=flags)
    if config is None:
        return
    with open_progress(sys.stderr) as progress:
        work = run_round(folder, config, config.run, "eval", config.attempts, progress)
        result = run_until_interrupted(work, f"The same command resumes ({folder}).")
    measured = {name: _results(result, name) for name in config.harnesses}
    if not all(measured.values()):
        empty = ", ".join(name for name, results in measured.items() if not results)
        raise OpenForgeError(
            f"no attempt in {empty} got a verdict, so there is nothing to measure; openforgerl show {folder} --failed"
        )
    summaries = {name: summarise(results, seed=config.seed) for name, results in measured.items()}
    failed = sum(isinstance(attempt.outcome, Failure) for attempt in result.last)
    document: dict[str, Any] = {"tasks": len(result.tasks), "attempts": config.attempts, "failed": failed}
    if len(summaries) == 1:
        document = {**msgspec.to_builtins(next(iter(summaries.values()))), **document}
    else:
        document |= {"harnesses": msgspec.to_builtins(summaries), "compared": _compared(measured, config.seed)}
    (folder / "eval.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, summary in summaries.items():
        if len(summaries) > 1:
            click.echo(f"{name}:")
        _print(summary)
    for name, difference in document.get("compared", {}).items():
        if (value := difference["pass_at_1"]) is not None:
            gain = f"{value['value']:+.3f}  [{value['low']:+.3f}, {value['high']:+.3f}]"
            click.echo(f"{name} over {next(iter(summaries))}, pass@1: {gain}")
    click.echo(f"{len(result.tasks)} tasks, {config.attempts} attempts each, {failed} without a verdict")
    click.echo(f"Written to {folder / 'eval.json'}")
    if failed:
        sys.exit(1)


def _print(summary: StageSummary) -> None:
    for name, _, k in METRICS:
        value: Interval | None = getattr(summary, name)
        if value is None:
            click.echo(f"{name:<12} needs {k} attempts per task")
        else:
            click.echo(f"{name:<12} {value.value:.3f}  [{value.low:.3f}, {value.high:.3f}]")


def _compared(measured: dict[str, list[TaskResult]], seed: int) -> dict[str, Any]:
    """Every further harness against the first, on the tasks that both have a verdict for."""
    (_, base), *others = measured.items()
    compared: dict[str, Any] = {}
    for name, results in others:
        both = {result.task for result in base} & {result.task for result in results}
        if both:
            left, right = ([one for one in side if one.task in both] for side in (base, results))
            compared[name] = msgspec.to_builtins(compare_stages(left, right, seed=seed))
    return compared


def _results(result: Round, harness: str) -> list[TaskResult]:
    passes: dict[str, list[bool]] = {}
    for attempt in result.last:
        rollout = result.rollouts[attempt.rollout_id]
        if isinstance(attempt.outcome, Verdict) and rollout.harness == harness:
            passes.setdefault(rollout.task, []).append(attempt.outcome.passed)
    return [TaskResult(task=name, passed=tuple(found)) for name, found in sorted(passes.items())]
