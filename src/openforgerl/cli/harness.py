"""`openforgerl harness`: install harnesses, list what is there."""

from __future__ import annotations

from pathlib import Path

import click

from openforgerl import plugins
from openforgerl.errors import InputError
from openforgerl.harnesses.catalogue import inspect, installable
from openforgerl.harnesses.catalogue import install as install_package
from openforgerl.harnesses.installation import default_cache


@click.group(name="harness")
def harness() -> None:
    """Install harnesses and list what is installed."""


@harness.command("install")
@click.argument("name", type=click.Choice(list(installable())))
@click.option("--cache", default=None, help="Where to install; default $OPENFORGERL_CACHE or ~/.cache/openforgerl.")
def install_command(name: str, cache: str | None) -> None:
    """Install harness NAME, pinned, into the cache. Does nothing when it is already there and whole."""
    directory = install_package(name, _cache(cache), lambda line: click.echo(line, err=True))
    click.echo(f"{name} is installed in {directory}")


@harness.command("list")
@click.option("--cache", default=None, help="Where to look; default $OPENFORGERL_CACHE or ~/.cache/openforgerl.")
def list_command(cache: str | None) -> None:
    """List harnesses, their pinned versions, and which are installed."""
    directory = _cache(cache)
    versions = installable()
    for name in sorted({*versions, *plugins.names("harness")}):
        version = versions.get(name)
        if version is None:
            click.echo(f"{name:<15} {'-':<10} comes with nothing to install; docs/harnesses.md says what it takes")
            continue
        try:
            found = inspect(name, directory)
        except InputError as error:
            click.echo(f"{name:<15} {version:<10} not usable: {error}")
        else:
            click.echo(f"{name:<15} {found.version:<10} {found.directory}")


def _cache(given: str | None) -> Path:
    return Path(given) if given else default_cache()
