"""`openforgerl demo`: the whole loop on this machine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from openforgerl.cli.configs import Chosen, resolve, rooms_options
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.progress import open_progress
from openforgerl.config import load_config
from openforgerl.demo.pipeline import Demo, demo_tasks, start_model
from openforgerl.demo.plots import LABELS, MEASURES
from openforgerl.demo.report import build_report, read_facts, write_report
from openforgerl.demo.seeds import summarise_seeds
from openforgerl.demo.settings import DemoConfig, demo_defaults
from openforgerl.orchestrator.assembly import check_rooms, keep_tokenizer, open_run
from openforgerl.protocols import Progress


@click.command()
@click.option(
    "--harness",
    type=click.Choice(["pi", "react", "codex", "claude-code"]),
    default="pi",
    show_default=True,
    help="Which harness. With codex or claude-code the demo is small: 4 families of tasks, 3 GRPO steps.",
)
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Run folder.  [default: runs/demo]")
@click.option("--seeds", type=click.IntRange(1, 20), help="Run so many seeds, one after another, and pool the result.")
@rooms_options
def demo(
    harness: str,
    folder: Path | None,
    seeds: int | None,
    chosen: Chosen,
) -> None:
    """Train a tiny model inside a real harness, end to end, on this machine.

    A scripted teacher acts in the harness; the model learns from its successes (SFT), then from its own rollouts
    in the harness (GRPO). Held-out tasks measure it before and after. The report is RUN/report.html. Killed or
    interrupted, the same command goes on where it stopped.

    With codex and claude-code (`openforgerl harness install NAME` first) the demo is small: it shows that every stage
    runs through them, and the report says what it does not show.
    """
    base = demo_defaults(harness)
    config = resolve(DemoConfig, chosen, base=base)
    if config is None:
        return
    path = folder or Path("runs") / ("demo" if harness == "pi" else f"demo-{harness}")
    check_rooms(config)  # an absent harness or bubblewrap: say so before any work
    with open_progress(sys.stderr) as progress:
        if seeds is None:
            report = _one(config, path, progress)
            _print(report, path)
            return
        reports: list[dict[str, Any]] = []
        for seed in range(config.seed, config.seed + seeds):
            progress.say(f"seed {seed}")
            seeded = load_config(DemoConfig, chosen.file, [*chosen.settings, f"seed={seed}"], base=base)
            reports.append(_one(seeded, path / f"seed-{seed}", progress))
    pooled = summarise_seeds(reports, command=_command())
    (path / "demo.json").write_text(json.dumps(pooled, indent=2) + "\n")
    gain = pooled["rl_minus_sft"]
    click.echo(
        f"RL over SFT, pass@1: {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] over {seeds} seeds"
    )
    click.echo(f"Written to {path / 'demo.json'}")


def _one(config: DemoConfig, path: Path, progress: Progress) -> dict[str, Any]:
    resume = f"The same command goes on where this stopped ({path})."
    return run_until_interrupted(_run(config, path, progress), resume)


async def _run(config: DemoConfig, path: Path, progress: Progress) -> dict[str, Any]:
    async with open_run(path, config) as folder:
        keep_tokenizer(path, start_model(config))
        tasks = demo_tasks()
        await Demo(folder, config, progress, tasks).run()
        report = build_report(await read_facts(folder, config, tasks))
    await asyncio.to_thread(write_report, report, path)
    return report


def _print(report: dict[str, Any], path: Path) -> None:
    console = Console()
    table = Table(title=f"Held-out tasks, {report['harness']['name']} {report['harness']['version']}")
    table.add_column("model")
    for name in MEASURES.values():
        table.add_column(f"{name}  [95 %]", justify="right")
    for stage, row in report["stages"].items():
        cells = [f"{row[key]['value']:.2f}  [{row[key]['low']:.2f}, {row[key]['high']:.2f}]" for key in MEASURES]
        table.add_row(LABELS[stage], *cells)
    console.print(table)
    gain = report["gain"]["rl_minus_sft"]
    console.print(
        f"RL over SFT, pass@1: {gain['value']:+.2f}  [{gain['low']:+.2f}, {gain['high']:+.2f}]", highlight=False
    )
    rl = report["rl"]
    difference = "none compared" if rl["logprob_difference"] is None else f"{rl['logprob_difference']:.1e}"
    console.print(
        f"Largest sampler/learner log-prob difference: {difference} ({rl['updates']} updates of {rl['steps']} steps)",
        highlight=False,
    )
    if report["note"]:
        console.print(report["note"], highlight=False)
    console.print(f"Trained in {report['seconds'] / 60:.1f} minutes. Report: {path / 'report.html'}", highlight=False)
    console.print(f"One attempt, token by token: openforgerl show {path}", highlight=False)


def _command() -> str:
    return " ".join(["openforgerl", *sys.argv[1:]])
