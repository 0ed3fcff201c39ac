"""`openforgerl export`: recorded rollouts for other tools."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import click

from openforgerl.errors import InputError
from openforgerl.formats import Decode, Report, Selection, format_names, open_writer
from openforgerl.orchestrator.assembly import TOKENIZER, read_run
from openforgerl.rendering import load_renderer
from openforgerl.store import RunStore


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--format", "name", required=True, type=click.Choice(format_names()), help="What to write.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File, or folder for atif; must be new.")
@click.option("--purpose", help="Only rollouts of this purpose (`show RUN` lists them).")
@click.option("--only-passed", is_flag=True, help="Only attempts that solved their task.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="For text columns. Default: the one kept in RUN.",
)
def export(folder: Path, name: str, out: Path, purpose: str | None, only_passed: bool, tokenizer: Path | None) -> None:
    """Write a run's rollouts in another tool's format, and say what that format loses.

    Graded attempts only, with the reward that they got; docs/exports.md says what each format holds. Works beside a
    running run.
    """
    directory = tokenizer or folder / TOKENIZER
    decode = load_renderer(directory).decode if directory.is_dir() else None
    report, left_out = asyncio.run(_export(folder, name, out, decode, purpose, only_passed))
    click.echo(
        f"{report.rows} rows of {report.attempts} attempts, {report.tokens} tokens ({report.trained_tokens} trained): "
        f"{out}"
    )
    for title, counts in (("attempts left out", left_out), (f"not in {name}", report.lost)):
        for what, count in counts.items():
            click.echo(f"  {title}: {count} {what}")


async def _export(
    folder: Path, name: str, out: Path, decode: Decode | None, purpose: str | None, only_passed: bool
) -> tuple[Report, dict[str, int]]:
    database = read_run(folder)
    try:
        store = RunStore(database)
        selection = Selection(store, purpose=purpose, only_passed=only_passed)
        async with aclosing(selection.records()) as records:
            first = await anext(records, None)
            if first is None:
                counts = ", ".join(f"{count} {what}" for what, count in sorted(selection.left_out.items()))
                raise InputError(f"{folder} has nothing to export; attempts left out: {counts or 'none, it has none'}")
            with open_writer(name, out, decode) as writer:
                writer.add(first)
                async for record in records:
                    writer.add(record)
                return writer.close(), dict(sorted(selection.left_out.items()))
    finally:
        await database.close()
