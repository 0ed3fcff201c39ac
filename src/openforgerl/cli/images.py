"""`openforgerl images`: what containers start from, built here and sent where it is needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import msgspec

from openforgerl.config import load_config
from openforgerl.config.schema import RoomsConfig
from openforgerl.errors import ConfigError, InputError
from openforgerl.orchestrator.assembly import open_harnesses, sandbox_spec
from openforgerl.sandboxes.container_engine import Engine, find_engine
from openforgerl.sandboxes.container_options import ContainerOptions
from openforgerl.sandboxes.images import (
    REPOSITORY,
    base_reference,
    build_base,
    build_task,
    present,
    task_reference,
)
from openforgerl.sandboxes.kubernetes.claims import fingerprint
from openforgerl.sandboxes.kubernetes.claims import warm_pool as pool_of
from openforgerl.sandboxes.kubernetes.manifests import Boarding, init_bundle
from openforgerl.sandboxes.kubernetes.manifests import check as check_pod
from openforgerl.sandboxes.kubernetes.manifests import pod as pod_manifest
from openforgerl.sandboxes.kubernetes.manifests import prepull as daemon_set
from openforgerl.tasks import needs_image, read_tasks
from openforgerl.types import Task

_config = click.option(
    "-c", "--config", "config", type=click.Path(path_type=Path, dir_okay=False), help="A TOML config file."
)
_settings = click.option("-s", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one value.")
_tasks = click.argument("tasks", required=False, type=click.Path(path_type=Path, exists=True))


@click.group()
def images() -> None:
    """Build the images that containers and pods start from, and send them to a registry."""


@images.command()
@_tasks
@_config
@_settings
def build(tasks: Path | None, config: Path | None, settings: tuple[str, ...]) -> None:
    """Build the base image, and an image for each of TASKS whose Dockerfile runs commands.

    The base image is made from Debian's packages by mmdebstrap, once. A task whose Dockerfile only copies files
    and sets variables needs no image of its own.
    """
    options = _options(config, settings)
    engine = find_engine(options)

    async def work() -> None:
        if not options.image:
            click.echo("base image: about two minutes when it is not there", err=True)
            _say(*await build_base(engine))
        base = options.image or base_reference()
        for task in _found(tasks):
            if needs_image(task):
                _say(*await build_task(engine, task, base if options.replace_from else None))
            else:
                click.echo(f"{task.name}: needs no image of its own", err=True)

    asyncio.run(work())


@images.command()
@click.argument("registry")
@_tasks
@_config
@_settings
def push(registry: str, tasks: Path | None, config: Path | None, settings: tuple[str, ...]) -> None:
    """Push the base image and those of TASKS to REGISTRY (host/path), and print the digests to name in configs.

    Log in with the engine's own `login` first.
    """
    options = _options(config, settings)
    engine = find_engine(options)

    async def work() -> None:
        base = options.image or base_reference()
        references = [base]
        references += [
            task_reference(task, base if options.replace_from else None) for task in _found(tasks) if needs_image(task)
        ]
        for reference in references:
            click.echo(await _pushed(engine, reference, registry))

    asyncio.run(work())


@images.command()
@click.argument("references", nargs=-1, metavar="IMAGE...")
@_config
@_settings
def prepull(references: tuple[str, ...], config: Path | None, settings: tuple[str, ...]) -> None:
    """Print a Kubernetes DaemonSet that has every node pull the IMAGEs before a run does: `| kubectl apply -f -`.

    Without IMAGE: sandbox.kubernetes.image and its layer images. Nodes keep them until the DaemonSet is deleted.
    """
    options = load_config(RoomsConfig, config, settings).sandbox.kubernetes
    chosen = references or tuple(
        dict.fromkeys(image for image in (options.image, *options.layer_images.values()) if image)
    )
    if not chosen:
        raise ConfigError("name images, or set sandbox.kubernetes.image")
    click.echo(msgspec.json.format(msgspec.json.encode(daemon_set(chosen, options))).decode())


@images.command("warm-pool")
@click.argument("tasks", type=click.Path(path_type=Path, exists=True))
@click.option("--replicas", type=click.IntRange(1), default=10, show_default=True, help="Pods that are kept ready.")
@_config
@_settings
def warm_pool(tasks: Path, replicas: int, config: Path | None, settings: tuple[str, ...]) -> None:
    """Print an agent-sandbox pool for runs of TASKS with this config, named sandbox.kubernetes.warm_pool.

    `| kubectl apply -n NAMESPACE -f -`. Its pods hold what all attempts have in common; print it anew after an upgrade.
    """
    chosen = load_config(RoomsConfig, config, ("backend=kubernetes", *settings))
    options = chosen.sandbox.kubernetes
    if not options.warm_pool:
        raise ConfigError("set sandbox.kubernetes.warm_pool to the name that the pool is to have")
    boarding = Boarding(attempt_id="warm-a0", nonce="0", arguments=(), env={}, init_map="init")
    owner = {"metadata": {"name": "none", "uid": "none"}}
    found: dict[str, dict[str, Any]] = {}
    for harness in open_harnesses(chosen).values():
        for task in read_tasks(tasks):
            spec = sandbox_spec(task, options.warm_pool, chosen, ("192.0.2.1", 8080))
            spec = msgspec.structs.replace(spec, layers=(*spec.layers, *harness.layers()))
            check_pod(spec, options)
            manifest = pod_manifest(spec, options, boarding, owner)
            found.setdefault(fingerprint(manifest), manifest)
    if len(found) != 1:
        raise InputError(f"{tasks} needs {len(found)} kinds of pods, and a pool has one: split the tasks by image")
    (manifest,) = found.values()
    objects = pool_of(manifest, init_bundle(), options.warm_pool, replicas)
    whole = {"apiVersion": "v1", "kind": "List", "items": objects}
    click.echo(msgspec.json.format(msgspec.json.encode(whole)).decode())


async def _pushed(engine: Engine, reference: str, registry: str) -> str:
    if not await present(engine, reference):
        raise InputError(f"image {reference} is not here: build it with `openforgerl images build`")
    name = reference.removeprefix(REPOSITORY + "/")
    target = f"{registry.rstrip('/')}/{name}"
    for words in (("tag", reference, target), ("push", target)):
        code, _, err = await engine.call(*words, timeout=3600)
        if code != 0:
            raise InputError(f"`{engine.program} {' '.join(words)}` failed: {err[-500:]}")
    digests = (await engine.image(target))["digests"]
    return f"{target} {digests}"


def _options(config: Path | None, settings: tuple[str, ...]) -> ContainerOptions:
    return load_config(RoomsConfig, config, settings).sandbox.container


def _found(tasks: Path | None) -> list[Task]:
    """Tasks with a Dockerfile of their own."""
    return [] if tasks is None else [task for task in read_tasks(tasks) if task.environment.dockerfile is not None]


def _say(reference: str, built: bool) -> None:
    click.echo(f"{reference} {'built' if built else 'was there'}")
