"""`openforgerl train`: SFT on recorded successes, GRPO inside the harness."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import click

from openforgerl.cli.configs import (
    MIXED_HARNESS_HELP,
    Chosen,
    config_options,
    given,
    harness_section,
    rooms_options,
    shown,
)
from openforgerl.cli.interruption import run_until_interrupted, terminate_like_interrupt
from openforgerl.cli.models import chosen_words, open_renderer
from openforgerl.cli.progress import open_progress, plain
from openforgerl.config import choose_tasks, load_config
from openforgerl.errors import ConfigError, InputError, Interrupted
from openforgerl.formats import read_conversations, samples_of
from openforgerl.orchestrator import failure_line
from openforgerl.orchestrator.assembly import check_rooms, keep_tokenizer, open_run, read_run
from openforgerl.protocols import Progress
from openforgerl.rendering import load_renderer
from openforgerl.store import RunStore
from openforgerl.training.configs import GrpoConfig, SftConfig
from openforgerl.training.grpo import StepReport
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import StepMetrics
from openforgerl.training.reinforcing import Watch, reinforce
from openforgerl.training.sft import ValidationPoint, train_sft
from openforgerl.training.verl.launching import (
    Launch,
    grpo_launch,
    last_checkpoint,
    prepare_grpo,
    sft_launch,
    write_rows,
)
from openforgerl.types import Attempt, Rollout, Sample, Verdict

trainer_option = click.option(
    "--trainer", type=click.Choice(["embedded", "verl"]), help="Our own, or veRL.  [default: embedded]"
)


@click.group()
def train() -> None:
    """SFT or GRPO on rollouts collected inside the harness."""


@train.command(short_help="Fine-tune on recorded successes.")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--model", required=True, type=click.Path(path_type=Path, exists=True, file_okay=False), help="Start.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Where checkpoints go.")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Conversations: OpenAI messages (*.jsonl) or ATIF (*.json or a folder); may be repeated.",
)
@trainer_option
@config_options
def sft(
    runs: tuple[Path, ...],
    model: Path,
    out: Path,
    data: tuple[Path, ...],
    trainer: str | None,
    chosen: Chosen,
) -> None:
    """Fine-tune MODEL on the solved attempts recorded in RUNS (run folders), and on the conversations in --data.

    Killed or interrupted, the same command goes on from the last checkpoint in OUT.
    """
    flags = {"trainer": trainer} if trainer else {}
    config = load_config(SftConfig, chosen.file, chosen.settings, flags=flags)
    if config.trainer == "verl":
        _sft_with_verl(config, runs, model, out, data, dry_run=chosen.dry_run)
        return
    if shown(config, chosen):
        return
    if not runs and not data:
        raise click.UsageError("Missing argument 'RUNS...': run folders, or conversations with --data")
    by_task = run_until_interrupted(_successes(runs), "Nothing was started.") | _conversations(data, model)
    train_rows, validation_rows = _split(by_task, config)
    learner = Learner(model, config.sft.learner, planned_steps=config.sft.steps)
    try:
        with terminate_like_interrupt(), open_progress(sys.stderr) as progress:
            progress.start("SFT", config.sft.steps)

            def on_step(metrics: StepMetrics, point: ValidationPoint | None) -> None:
                progress.advance("SFT", note=None if point is None else f"validation loss {point.loss:.3f}")

            result = train_sft(
                learner, train_rows, validation_rows, config.sft, directory=out, companions=model, on_step=on_step
            )
            progress.finish("SFT")
    except KeyboardInterrupt as stopped:
        raise Interrupted(f"The same command goes on from the last checkpoint in {out}.") from stopped
    best = min(result.curve, key=lambda point: point.loss)
    click.echo(f"Best validation loss {best.loss:.4f} at step {best.step}: {result.best}")


async def _successes(runs: tuple[Path, ...]) -> dict[str, list[Sample]]:
    """Task → samples of its solved attempts."""
    by_task: dict[str, list[Sample]] = {}
    for folder in runs:
        database = read_run(folder)
        try:
            store = RunStore(database)
            rollouts = {rollout.rollout_id: rollout for rollout in await store.rollouts()}
            solved = {
                attempt.attempt_id: rollouts[attempt.rollout_id].task
                for attempt in await store.attempts()
                if isinstance(attempt.outcome, Verdict) and attempt.outcome.passed
            }
            for attempt_id, found in (await store.samples(list(solved))).items():
                by_task.setdefault(solved[attempt_id], []).extend(found.samples)
        finally:
            await database.close()
    return by_task


def _conversations(data: tuple[Path, ...], model: Path) -> dict[str, list[Sample]]:
    """Name of a conversation → its samples, as the model's own template writes them."""
    if not data:
        return {}
    renderer = load_renderer(model)
    taken: dict[Path, str] = {}
    found: dict[str, list[Sample]] = {}
    notes: Counter[str] = Counter()
    for path in data:
        for one in read_conversations(path):
            place = Path(one.name).resolve()  # of file and line: one file may be named in two ways
            if place in taken:
                raise InputError(f"{one.name} is {taken[place]}, which --data names already: it would train twice")
            taken[place] = one.name
            notes.update(set(one.notes))
            found[one.name] = list(samples_of(one, renderer).samples)
    for note, count in notes.most_common():
        click.echo(plain(f"in {count} of {len(found)} conversations: {note}"), err=True)
    return found


def _split(by_task: dict[str, list[Sample]], config: SftConfig) -> tuple[list[Sample], list[Sample]]:
    """Train and validation samples, split by task so that no task is on both sides."""
    names = sorted(name for name, rows in by_task.items() if any(row.trained_tokens for row in rows))
    if idle := len(by_task) - len(names):
        click.echo(f"{idle} solved tasks and conversations are left out: nothing in them trains", err=True)
    if len(names) < 2:
        raise InputError(f"{len(names)} solved tasks and conversations with trained tokens; SFT needs at least two")
    kept = set(random.Random(config.seed).sample(names, max(1, round(config.validation_share * len(names)))))
    return (
        [sample for name in names if name not in kept for sample in by_task[name]],
        [sample for name in names if name in kept for sample in by_task[name]],
    )


@train.command(short_help="GRPO, every rollout in the harness.")
@click.argument("tasks", required=False, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Model directory to start."
)
@click.option("--harness", "harnesses", multiple=True, help=MIXED_HARNESS_HELP)
@click.option(
    "--run", "folder", type=click.Path(path_type=Path), default=Path("runs/grpo"), show_default=True, help="Run folder."
)
@trainer_option
@rooms_options
def grpo(
    tasks: Path | None,
    model: Path | None,
    harnesses: tuple[str, ...],
    folder: Path,
    trainer: str | None,
    chosen: Chosen,
) -> None:
    """Train MODEL with GRPO on the Harbor tasks in TASKS, every rollout inside the harness.

    Checkpoints are model directories in RUN/checkpoints/rl; any of them serves as `--engine torch:DIR`. Killed or
    interrupted, the same command goes on with the next step.
    """
    flags = given(
        engine={"kind": "torch" if model else None, "path": str(model) if model else None},
        tasks={"path": str(tasks) if tasks else None},
    ) | harness_section(harnesses)
    if trainer:
        flags["trainer"] = trainer
    config = load_config(GrpoConfig, chosen.file, chosen.settings, flags=flags)
    if config.trainer == "verl":
        _grpo_with_verl(config, folder, dry_run=chosen.dry_run)
        return
    if shown(config, chosen):
        return
    _check_model(config)
    with open_progress(sys.stderr) as progress:
        work = _grpo(config, Path(config.engine.path), folder, progress)
        last = run_until_interrupted(work, f"The same command resumes ({folder}).")
    click.echo(f"Trained {config.train.steps} steps: {last}")


def _check_model(config: GrpoConfig) -> None:
    if config.engine.kind != "torch" or not config.engine.path:
        raise ConfigError("GRPO trains a model directory: give --model DIR, or [engine] path")


def _grpo_with_verl(config: GrpoConfig, folder: Path, *, dry_run: bool) -> None:
    _check_model(config)
    launch = grpo_launch(config, folder)
    if dry_run:
        click.echo(f"# {launch.shell}\n{launch.resolved()}", nl=False)
        return
    run_until_interrupted(prepare_grpo(config, folder), "Nothing was started.")
    _run_verl(launch, folder)
    click.echo(f"Trained {config.train.steps} steps: {last_checkpoint(folder)}")


def _sft_with_verl(
    config: SftConfig, runs: tuple[Path, ...], model: Path, out: Path, data: tuple[Path, ...], *, dry_run: bool
) -> None:
    if data:
        raise click.UsageError("--data goes with our own trainer; veRL trains on run folders")
    if not runs:
        raise click.UsageError("Missing argument 'RUNS...': run folders")
    launch = sft_launch(config, out, model)
    if dry_run:
        click.echo(f"# {launch.shell}\n{launch.resolved()}", nl=False)
        return
    report = run_until_interrupted(write_rows(runs, out), "Nothing was started.")
    click.echo(f"{report.rows} rows of {report.attempts} solved attempts, {report.trained_tokens} trained tokens")
    _run_verl(launch, out)
    click.echo(f"Trained {config.sft.steps} steps: {out}")


def _run_verl(launch: Launch, folder: Path) -> None:
    try:
        with terminate_like_interrupt():
            launch.run()
    except KeyboardInterrupt as stopped:
        raise Interrupted(f"The same command goes on from the last checkpoint in {folder}.") from stopped


async def _grpo(config: GrpoConfig, model: Path, folder: Path, progress: Progress) -> Path:
    options = config.train
    tasks, renderer = choose_tasks(config), open_renderer(model, config.proxy)
    progress.say(chosen_words(renderer, config.proxy))
    check_rooms(config)
    progress.start("GRPO", options.steps)

    def on_attempt(rollout: Rollout, attempt: Attempt) -> None:
        if line := failure_line(attempt):
            progress.say(line)

    def on_step(report: StepReport) -> None:
        progress.advance("GRPO", note=f"mean reward {report.reward_mean:.2f}")

    async with open_run(folder, config) as opened:
        keep_tokenizer(folder, model)
        last = await reinforce(
            opened,
            config,
            config.run,
            options,
            start=model,
            tasks=tasks,
            renderer=renderer,
            watch=Watch(on_attempt, on_step),
        )
    progress.finish("GRPO")
    return last
