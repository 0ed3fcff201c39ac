"""`openforgerl run`: rollouts of tasks in a harness, recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.table import Table

from openforgerl.cli.configs import Chosen, RunConfig, config_options, resolve, round_flags
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.progress import open_console, open_progress
from openforgerl.cli.rounds import Round, run_round
from openforgerl.types import Failure, Verdict


@click.command()
@click.argument("tasks", type=click.Path(path_type=Path, exists=True))
@click.option("--engine", "spec", metavar="SPEC", help="scripted:FILE or torch:DIR.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Default: the engine's (torch:DIR).",
)
@click.option("--harness", help="pi, react, command or module:Class.  [default: pi]")
@click.option("--attempts", type=click.IntRange(1), help="Rollouts per task.  [default: 1]")
@click.option(
    "--run", "folder", type=click.Path(path_type=Path), default=Path("runs/run"), show_default=True, help="Run folder."
)
@config_options
def run(
    tasks: Path,
    spec: str | None,
    tokenizer: Path | None,
    harness: str | None,
    attempts: int | None,
    folder: Path,
    chosen: Chosen,
) -> None:
    """Run the Harbor task directory TASKS (or all tasks in it) in a harness and record the rollouts.

    Look at what happened with `openforgerl show RUN`. Killed or interrupted, the same command resumes.
    """
    flags = round_flags(tasks, spec, tokenizer, harness, attempts)
    config = resolve(RunConfig, chosen, flags=flags)
    if config is None:
        return
    with open_progress(sys.stderr) as progress:
        work = run_round(folder, config, config.run, "run", config.attempts, progress)
        result = run_until_interrupted(work, f"The same command resumes ({folder}).")
    _print(result, folder)
    if any(isinstance(attempt.outcome, Failure) for attempt in result.last):
        sys.exit(1)


def _print(result: Round, folder: Path) -> None:
    table = Table()
    for column in ("task", "attempt", "outcome"):
        table.add_column(column, overflow="fold")
    for attempt in result.last:
        outcome = attempt.outcome
        said = (
            f"reward {outcome.reward:g}"
            if isinstance(outcome, Verdict)
            else f"{outcome.origin}: {outcome.kind}"
            if outcome
            else ""
        )
        table.add_row(result.rollouts[attempt.rollout_id].task, attempt.attempt_id, said)
    console = open_console()
    console.print(table)
    console.print(f"Look closer: openforgerl show {folder} ATTEMPT", highlight=False)
