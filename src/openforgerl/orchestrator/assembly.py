"""Opens the rooms one run needs, from its config: engine, proxy, store, sandboxes, harness, orchestrator.

On one machine they share a process; the run folder is all that outlives it (DESIGN §6).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from openforgerl import __version__, plugins
from openforgerl.config import RoomsConfig, resolved_json
from openforgerl.errors import ConfigError, InputError, OpenForgeError
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.orchestrator.environments import WITH_IMAGES, environment_of
from openforgerl.orchestrator.options import RunOptions
from openforgerl.orchestrator.runs import Orchestrator
from openforgerl.protocols import Engine, Harness, NetworkedSandboxes, Renderer, Sandboxes
from openforgerl.proxy import InProcessSessions, ProxyServer
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.sessions import CallLog
from openforgerl.rollout import Rooms
from openforgerl.sandboxes.bubblewrap import find_bwrap
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.store import CallStore, Database, RunStore
from openforgerl.types import Attempt, Rollout, SandboxSpec, Task

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
CARRY = "carry"
PORT = "proxy.port"
"""Name of the value that keeps the data port, where sandboxes know it by its number."""
TOKENIZER = "tokenizer"
"""Folder inside the run folder."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder and its open database. `config.json` is written once; another config is refused."""

    path: Path
    run_id: str
    config_digest: str
    store: RunStore
    calls: CallLog
    """What the proxy records to."""


@asynccontextmanager
async def open_run(path: Path, config: msgspec.Struct) -> AsyncGenerator[RunFolder]:
    """Open or resume the run at `path`.

    The run id is derived from the folder's absolute path, so that leftover sandboxes are found after a
    restart. Raises ConfigError when the folder cannot be written or belongs to a run with another config.
    """
    make_run_folder(path)
    resolved = resolved_json(config)
    config_file = path / CONFIG_FILE
    if config_file.exists() and config_file.read_bytes() != resolved:
        raise ConfigError(
            f"{path} holds a run with another config (compare {config_file} with --dry-run); "
            "use another run folder, or delete this one to start over"
        )
    run_id = "run-" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    database = Database.open(path / "run.sqlite")
    try:
        if not config_file.exists():
            partial = config_file.with_suffix(".tmp")
            partial.write_bytes(resolved)
            partial.replace(config_file)
        store = RunStore(database)
        digest = hashlib.sha256(resolved).hexdigest()
        await store.put_run(run_id, digest, msgspec.json.decode(resolved))
        yield RunFolder(path, run_id, digest, store, CallStore(database))
    finally:
        await database.close()


def make_run_folder(path: Path) -> None:
    """Make a run folder when missing. ConfigError naming it when it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder {path} cannot be made ({error.strerror}); name another with --run") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"run folder {path} cannot be written by this user; name another with --run")


def read_run(path: Path) -> Database:
    """The database of the run at `path`, read-only, also beside a running run. InputError when there is none."""
    return Database.read_only(_run_file(path))


def take_run(path: Path) -> Database:
    """The database of the run at `path` for writing, which one process can at a time. InputError when there is none,
    StoreError when somebody works on the run."""
    return Database.open(_run_file(path))


def _run_file(path: Path) -> Path:
    file = path / "run.sqlite"
    if not file.is_file():
        raise InputError(f"{path} is no run folder: it has no run.sqlite")
    return file


def open_sandboxes(backend: str, options: SandboxOptions, folder: Path) -> Sandboxes:
    """The backend of the run in `folder`, which keeps its records there."""
    opened: Sandboxes = plugins.load("sandbox", backend)(options, folder / "sandboxes")
    return opened


def check_rooms(config: RoomsConfig) -> None:
    """Everything the config names is here. A run calls this before it touches its folder: a config that cannot
    work is then not the folder's config. Raises InputError saying how to get what is missing."""
    backend: Any = plugins.load("sandbox", config.backend)
    if config.backend in WITH_IMAGES:
        backend.check(config.sandbox)
    if config.backend == "process":
        find_bwrap(config.sandbox.bwrap)
    for harness in open_harnesses(config).values():
        harness.layers()


@asynccontextmanager
async def listening(proxy: ProxyServer) -> AsyncGenerator[ProxyServer]:
    """Serve `proxy`. ConfigError naming the address and the ways out when it cannot be listened on."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(proxy.serving())
        except OSError as error:
            options = proxy.options
            raise ConfigError(
                f"the proxy cannot listen on {options.host}, ports {options.port} and {options.control_port} "
                f"(proxy.host, proxy.port, proxy.control_port): {error.strerror or error}; port 0 takes any free one"
            ) from error
        yield proxy


def keep_tokenizer(folder: Path, source: Path) -> None:
    """Copy a model's tokenizer and chat template into the run folder, so that its tokens can be read later.

    A file gets its name when it is whole: what is there is never copied again, so half of one would stay.
    """
    target = folder / TOKENIZER
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            partial = target / f".{name}.{os.getpid()}"  # a proxy and a run may copy at once
            shutil.copyfile(source / name, partial)
            partial.replace(target / name)


@dataclass(frozen=True, slots=True)
class House:
    """Rooms opened around one engine."""

    engine: Engine
    renderer: Renderer
    proxy: ProxyServer
    orchestrator: Orchestrator


@asynccontextmanager
async def open_house(
    folder: RunFolder,
    config: RoomsConfig,
    run: RunOptions,
    *,
    engine: Engine,
    renderer: Renderer,
    tasks: Mapping[str, Task],
    on_attempt: Callable[[Rollout, Attempt], None],
) -> AsyncGenerator[House]:
    """Serve `engine` behind the proxy and make an orchestrator for `tasks`. Leftovers of a dead process go first."""
    harnesses = open_harnesses(config)
    sandboxes = open_sandboxes(config.backend, config.sandbox, folder.path)
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(sandboxes, AbstractAsyncContextManager):
            await stack.enter_async_context(sandboxes)
        # Sandboxes reach the proxy without the host's network, which may not even have a loopback that is up.
        path = config.proxy.unix_socket or f"\0openforgerl-{secrets.token_hex(8)}"
        options = msgspec.structs.replace(config.proxy, unix_socket=path)
        address = await sandboxes.address() if isinstance(sandboxes, NetworkedSandboxes) else ""
        if address and options.host == ProxyOptions().host:
            options = msgspec.structs.replace(options, host=address)
        if address and options.port == 0:
            options = msgspec.structs.replace(options, port=await _earlier_port(folder, options.host))
        proxy = ProxyServer(engine=engine, renderer=renderer, store=folder.calls, options=options)
        await stack.enter_async_context(listening(proxy))
        endpoint = (address, proxy.data_address[1]) if address else path
        if address:
            await folder.store.put_value(PORT, proxy.data_address[1])
        specs: dict[str, SandboxSpec] = {}

        def spec(task: Task) -> SandboxSpec:
            # A pure function of the task; reading its Dockerfile again for every attempt would be waste.
            if task.name not in specs:
                specs[task.name] = sandbox_spec(task, folder.run_id, config, endpoint)
            return specs[task.name]

        carry = folder.path / CARRY
        shutil.rmtree(carry, ignore_errors=True)  # of a killed process; the open database says that we are alone
        carry.mkdir()
        rooms = Rooms(
            sessions=InProcessSessions(proxy),
            sandboxes=sandboxes,
            harnesses=harnesses,
            verifier=plugins.load("verifier", "script")(),
            spec=spec,
            model=engine.model_name,
            context_length=engine.context_length,
            options=config.rollout,
            provenance={
                "openforgerl": __version__,
                "node": platform.node(),
                "config": folder.config_digest,
                "template": renderer.digest,
                "engine_kind": config.engine.kind,
                "model": config.engine.path or engine.model_name,
            },
            carry=carry,
        )
        orchestrator = Orchestrator(
            rooms=rooms,
            store=folder.store,
            tasks=tasks,
            options=run,
            weights_version=lambda: engine.weights_version,
            on_attempt=on_attempt,
            load=lambda: proxy.calls_in_flight,
            policy=config.samples,
        )
        await orchestrator.reconcile(folder.run_id)
        yield House(engine, renderer, proxy, orchestrator)
        try:
            await sandboxes.reap(folder.run_id)  # what an attempt could not remove
        except (
            OpenForgeError
        ) as error:  # the results are there; what is left is said, and tried again by the next start
            log.error("sandboxes of this run are left behind: %s", error)


async def _earlier_port(folder: RunFolder, host: str) -> int:
    """The data port of an earlier process of this run, when it is free: harnesses that live on call it. Else 0."""
    kept = await folder.store.value(PORT)
    if not isinstance(kept, int):
        return 0
    try:
        with socket.create_server((host, kept)):
            return kept
    except OSError:
        return 0


def open_harnesses(config: RoomsConfig) -> dict[str, Harness]:
    """Every harness of the run by name, each with the settings of `[harness]`."""
    return {name: open_harness(msgspec.structs.replace(config.harness, name=name)) for name in config.harnesses}


def open_harness(options: HarnessOptions) -> Harness:
    """The harness that the config names; InputError with the install command when it is not there."""
    harness: Any = plugins.load("harness", options.name)
    if not (isinstance(harness, type) and hasattr(harness, "layers") and hasattr(harness, "plan")):
        raise ConfigError(f"harness.name {options.name!r} is no harness class: it has no layers() and plan()")
    opened: Harness = harness(options)
    return opened


def sandbox_spec(task: Task, run_id: str, config: RoomsConfig, endpoint: tuple[str, int] | str) -> SandboxSpec:
    """What a task's sandbox is made of, but for the harness's layers."""
    environment, image = environment_of(task, config)
    limits = config.limits
    if task.environment.memory_mb is not None:
        limits = msgspec.structs.replace(limits, memory_mb=min(limits.memory_mb, task.environment.memory_mb))
    spec = SandboxSpec(
        run_id=run_id,
        image=image,
        workdir=environment.workdir,
        files=environment.files,
        env=environment.env,
        limits=limits,
        endpoint=endpoint,
    )
    if isinstance(endpoint, tuple):
        return msgspec.structs.replace(spec, endpoint_host=endpoint[0], endpoint_port=endpoint[1])
    return spec
