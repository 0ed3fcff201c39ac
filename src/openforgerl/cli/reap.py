"""`openforgerl reap`: destroy what dead runs left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from openforgerl import plugins
from openforgerl.cli.configs import Chosen, config_options, resolve
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.config import RoomsConfig
from openforgerl.errors import ConfigError, InputError
from openforgerl.orchestrator.assembly import open_sandboxes, read_run, take_run
from openforgerl.protocols import Sandboxes
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.store import RunStore


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--expired", is_flag=True, help="Kubernetes: every run of its namespaces with a dead owner (its Lease).")
@click.option("--list", "only_list", is_flag=True, help="Say what is there, and destroy nothing.")
@config_options
def reap(runs: tuple[Path, ...], expired: bool, only_list: bool, chosen: Chosen) -> None:
    """Destroy what dead runs left: processes, containers, pods and their objects.

    RUNS are run folders, whose own configs say where their sandboxes are. A run that is being worked on is refused.
    Runs reap themselves when they start and end; this is for those that nobody will start again.
    """
    config = resolve(RoomsConfig, chosen)
    if config is None:
        return
    if not runs and not expired:
        raise ConfigError("name run folders, or give --expired")
    for folder in runs:
        click.echo(run_until_interrupted(_reap_folder(folder, only_list), "The same command goes on."))
    if expired:
        for line in run_until_interrupted(_reap_expired(config.sandbox, only_list), "The same command goes on."):
            click.echo(line)


async def _reap_folder(folder: Path, only_list: bool) -> str:
    # Opened for writing, which one process can at a time: nobody works on the run meanwhile.
    database = read_run(folder) if only_list else take_run(folder)
    try:
        found = 0
        for run_id, config in (await RunStore(database).runs()).items():
            sandboxes = _backend(config, folder)
            async with contextlib.AsyncExitStack() as stack:
                closes: Any = getattr(sandboxes, "close", None)
                if closes is not None:
                    stack.push_async_callback(closes)
                found += len(await sandboxes.list(run_id)) if only_list else await sandboxes.reap(run_id)
    finally:
        await database.close()
    return f"{folder}: {found} sandboxes{'' if only_list else ' destroyed'}"


def _backend(config: object, folder: Path) -> Sandboxes:
    """The backend that the run's own config names, as a run opens it."""
    if not isinstance(config, dict):
        raise InputError(f"{folder}: its config says nothing of sandboxes")
    options = msgspec.convert(config.get("sandbox", {}), SandboxOptions)
    return open_sandboxes(str(config.get("backend", "process")), options, folder)


async def _reap_expired(options: SandboxOptions, only_list: bool) -> Sequence[str]:
    reaping: Any = plugins.load("reaping", "kubernetes")
    lines: list[str] = await reaping(options, os.environ, time.time(), only_list)
    return lines
