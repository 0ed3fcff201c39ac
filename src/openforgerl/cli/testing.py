"""`openforgerl testing`: small models and fakes for tests of your own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from openforgerl import plugins
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.errors import Interrupted
from openforgerl.testing.fake_kubernetes import Clock, ClusterOptions, FakeCluster, certificates


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


@testing.command("fake-kubernetes")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1.  [default: any free one]")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write the administrator's kubeconfig to (0600).",
)
@click.option("--namespace", default="default", show_default=True, help="Namespace of the kubeconfig; made when new.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="How many times faster than a real cluster it schedules, starts and removes pods.",
)
def fake_kubernetes(port: int, kubeconfig: Path, namespace: str, speed: float) -> None:
    """Serve a fake Kubernetes cluster until Ctrl-C; its pods are processes of this machine.

    Whatever image a pod names, it runs in this machine's own system directories, read-only, in bubblewrap. The network
    is this machine's. To try the Kubernetes backend without a cluster: set KUBECONFIG to FILE. It serves HTTPS where
    the openssl program is found; kubectl needs that.
    """
    options = ClusterOptions(
        tls=certificates.can_make(),
        port=port,
        namespaces=[] if namespace == "default" else [namespace],
        clock=Clock(1 / speed),
    )
    try:
        run_until_interrupted(_serve_cluster(options, kubeconfig, namespace), "Its pods are gone with it.")
    except Interrupted as stopped:
        click.echo(f"Stopped. {stopped}", err=True)


async def _serve_cluster(options: ClusterOptions, kubeconfig: Path, namespace: str) -> None:
    async with FakeCluster(options) as cluster:
        cluster.write_kubeconfig(kubeconfig, namespace=namespace)
        click.echo(f"Fake Kubernetes at {cluster.url}; use it: export KUBECONFIG={kubeconfig.absolute()}")
        await asyncio.Event().wait()
