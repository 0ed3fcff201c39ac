"""What this machine can do with containers, for `openforgerl doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.container_engine import Engine, find_engine, rootless
from openforgerl.sandboxes.images import base_reference, present
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check
from openforgerl.sandboxes.runtime import build_runtime, cache_directory


def probe_containers(options: SandboxOptions, *, required: bool) -> list[Check]:
    """Ask the engine, and start one small container where its image is here. `required`: a run would need it."""
    return list(_checks(options, required))


def _checks(options: SandboxOptions, required: bool) -> Iterator[Check]:
    try:
        engine = find_engine(options.container)
    except InputError as error:
        detail = "not found; only the backend `container` needs one"
        yield Check(check="container engine", ok=False, detail=detail, fix=str(error), required=required)
        return
    reference = options.container.image or base_reference()
    if not asyncio.run(present(engine, reference)):
        detail = f"{reference} is not here"
        yield Check(check="container image", ok=False, detail=detail, fix="openforgerl images build", required=required)
        return
    yield Check(check="container image", ok=True, detail=reference)
    try:
        asyncio.run(_prove(options, reference, engine))
    except (StageError, InputError) as error:
        yield Check(check="container engine", ok=False, detail="cannot run", fix=str(error), required=required)
        return
    who = "as an ordinary user" if rootless() else "as root"
    settings = f"; settings found by asking: {', '.join(engine.cures)}" if engine.cures else ""
    yield Check(check="container engine", ok=True, detail=f"{engine.program} {engine.version}, {who}{settings}")
    grouped = options.cgroups != "off" and cgroups.detect() is not None
    yield Check(
        check="container limits",
        ok=grouped,
        detail="a cgroup of ours for the agent, the engine's for init" if grouped else "the engine's, init included",
        fix="" if grouped else "run as root: an agent that exhausts memory can then not end its own sandbox",
        required=False,
    )


async def _prove(options: SandboxOptions, reference: str, engine: Engine) -> None:
    runtime = await asyncio.to_thread(build_runtime, cache_directory())
    await engine.prove(reference, runtime, timeout=options.start_timeout)
