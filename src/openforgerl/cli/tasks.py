"""`openforgerl tasks`: list, show and check Harbor task directories."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.table import Table

from openforgerl.cli.progress import cell, open_console, plain
from openforgerl.errors import InputError
from openforgerl.tasks import lint, plan_environment, read_task, read_tasks, task_directories

PATH = click.Path(path_type=Path, exists=True, file_okay=False)


@click.group()
def tasks() -> None:
    """List, show and check Harbor task directories."""


@tasks.command("list")
@click.argument("path", type=PATH)
def list_command(path: Path) -> None:
    """List the tasks in PATH (a task directory, or a directory of them)."""
    table = Table()
    for column in ("task", "split", "agent limit", "instruction"):
        table.add_column(column, overflow="fold")
    for task in read_tasks(path):
        first = task.instruction.strip().splitlines()[0]
        words = (task.name, str(task.metadata.get("split", "")), f"{task.agent_timeout:g} s", first)
        table.add_row(*map(cell, words))
    open_console().print(table)


@tasks.command()
@click.argument("path", type=PATH)
def show(path: Path) -> None:
    """Show one task: its instruction, environment and limits."""
    task = read_task(path)
    click.echo(plain(f"{task.name}\n{task.digest}\n\n{task.instruction.strip()}\n"))
    environment = plan_environment(task)
    click.echo(plain(f"work directory  {environment.workdir}"))
    for inside, outside in environment.files.items():
        click.echo(plain(f"file            {inside}  ({outside})"))
    for note in environment.notes:
        click.echo(plain(f"note            {note}"))
    click.echo(f"limits          agent {task.agent_timeout:g} s, verifier {task.verifier_timeout:g} s")


@tasks.command()
@click.argument("path", type=PATH)
def check(path: Path) -> None:
    """Check the task directories in PATH. Exit code 1 when one cannot be used."""
    bad = 0
    directories = task_directories(path)
    if not directories:
        raise InputError(f"{path} holds no task: no directory with a task.toml in it")
    for directory in directories:
        for finding in lint(directory):
            bad += finding.level == "error"
            click.echo(plain(f"{directory.name}: {finding}"))
    click.echo(f"{len(directories)} task directories, {bad} errors")
    sys.exit(1 if bad else 0)
