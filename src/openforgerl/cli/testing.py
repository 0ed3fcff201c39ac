"""`openforgerl testing`: small models and fakes for tests of your own."""

from __future__ import annotations

from pathlib import Path

import click

from openforgerl import plugins


@click.group(name="testing")
def testing() -> None:
    """Small models and fakes for tests of your own."""


@testing.command("tiny-model")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random weights.")
def tiny_model(directory: Path, seed: int) -> None:
    """Write a tiny random Qwen3 model with tokenizer and chat template to DIRECTORY.

    It answers nonsense, in about a millisecond a token: enough to test a harness, a proxy or a trainer.
    Needs numpy and safetensors, which the extra `train` holds; torch only to serve it.
    """
    plugins.load("model", "tiny")(directory, seed=seed)
    click.echo(f"Wrote a tiny random model to {directory}. Serve it: openforgerl proxy --engine torch:{directory}")
