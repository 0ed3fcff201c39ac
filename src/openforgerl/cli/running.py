"""`openforgerl run`: rollouts of tasks in a harness, recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from openforgerl.cli.configs import Chosen, RunConfig, resolve, round_options
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.progress import cell, open_console, open_progress
from openforgerl.cli.rounds import Round, run_round
from openforgerl.types import Failure, Verdict


@click.command()
@round_options(folder="runs/run")
def run(folder: Path, flags: dict[str, Any], chosen: Chosen) -> None:
    """Run the Harbor task directory TASKS (or all tasks in it) in a harness and record the rollouts.

    Each task gets one rollout, or `-s attempts=N`. Look at what happened with `openforgerl show RUN`. Killed or
    interrupted, the same command resumes.
    """
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
        table.add_row(*map(cell, (result.rollouts[attempt.rollout_id].task, attempt.attempt_id, said)))
    console = open_console()
    console.print(table)
    console.print(f"Look closer: openforgerl show {folder} ATTEMPT", highlight=False, markup=False)
