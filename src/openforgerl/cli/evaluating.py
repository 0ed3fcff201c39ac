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
from openforgerl.evals.summary import METRICS, TaskResult, summarise
from openforgerl.types import Failure, Verdict


@click.command(name="eval")
@round_options(attempts="Attempts per task, the k of pass@k.  [default: 3]", folder="runs/eval")
def eval(folder: Path, flags: dict[str, Any], chosen: Chosen) -> None:
    """Measure a model on the Harbor task directory TASKS (or all tasks in it), inside a harness.

    Prints pass@1, pass@k and pass^k with 95 % intervals over tasks and writes RUN/eval.json. Attempts that failed
    for reasons of ours are refilled, never counted as wrong.
    """
    config = resolve(EvalConfig, chosen, flags=flags)
    if config is None:
        return
    with open_progress(sys.stderr) as progress:
        work = run_round(folder, config, config.run, "eval", config.attempts, progress)
        result = run_until_interrupted(work, f"The same command resumes ({folder}).")
    results = _results(result)
    if not results:
        raise OpenForgeError(
            f"no attempt got a verdict, so there is nothing to measure; openforgerl show {folder} --failed"
        )
    summary = summarise(results, seed=config.seed)
    failed = sum(isinstance(attempt.outcome, Failure) for attempt in result.last)
    document: dict[str, Any] = {
        **msgspec.to_builtins(summary),
        "tasks": len(result.tasks),
        "attempts": config.attempts,
        "failed": failed,
    }
    (folder / "eval.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, _, k in METRICS:
        value = document[name]
        if value is None:
            click.echo(f"{name:<12} needs {k} attempts per task")
        else:
            click.echo(f"{name:<12} {value['value']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]")
    click.echo(f"{len(result.tasks)} tasks, {config.attempts} attempts each, {failed} without a verdict")
    click.echo(f"Written to {folder / 'eval.json'}")
    if failed:
        sys.exit(1)


def _results(result: Round) -> list[TaskResult]:
    passes: dict[str, list[bool]] = {}
    for attempt in result.last:
        if isinstance(attempt.outcome, Verdict):
            passes.setdefault(result.rollouts[attempt.rollout_id].task, []).append(attempt.outcome.passed)
    return [TaskResult(task=name, passed=tuple(found)) for name, found in sorted(passes.items())]
