"""The container backend: an image's root, our init as PID 1, limits by the engine.

What holds and why is in `docs/decisions/0008-containers.md`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from openforgerl.errors import InputError, StoreError
from openforgerl.sandboxes import cgroups, seccomp
from openforgerl.sandboxes.channel import Channel
from openforgerl.sandboxes.container_engine import Engine, failed, find_engine, missing_image, names_of
from openforgerl.sandboxes.container_records import ContainerRef, load_containers
from openforgerl.sandboxes.container_run import LABEL, meet, run_words, serve_directory
from openforgerl.sandboxes.container_vessel import ContainerVessel, described
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.images import base_reference
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.runtime import Runtime, build_runtime, cache_directory
from openforgerl.sandboxes.sandbox import LiveSandbox
from openforgerl.sandboxes.spec import check_spec, init_settings
from openforgerl.types import JsonValue, SandboxRef, SandboxSpec


class ContainerSandboxes:
    """`protocols.Sandboxes` by a container engine. `state_dir` holds a small folder for each living sandbox.

    `guards` is for tests only (see `guards.py`).
    """

    def __init__(self, options: SandboxOptions, state_dir: Path, *, guards: Guards | None = None) -> None:
        self._options = options
        self._state = state_dir.absolute() / "containers"  # an engine takes what is no absolute path for a volume
        self._guards = guards or Guards()
        self._engine: Engine | None = None
        self._runtime: Runtime | None = None
        self._images: dict[str, dict[str, JsonValue]] = {}
        self._hierarchy: cgroups.Hierarchy | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def check(cls, options: SandboxOptions) -> None:
        """Refuse, before a run begins, what cannot work. Raises InputError saying how to get what is missing."""
        engine = find_engine(options.container)
        reference = options.container.image or base_reference()
        words = [engine.program, "image", "inspect", "--format", "{{.Id}}", reference]
        try:
            found = subprocess.run(words, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"`{' '.join(words)}` failed: {error}") from error
        if found.returncode != 0:
            raise InputError(missing_image(engine.program, reference, found.stderr.decode(errors="replace")))

    @asynccontextmanager
    async def create(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[LiveSandbox]:
        """A running sandbox with `spec.files` in place; closed at the end, whatever happens.

        Raises InputError for a spec that cannot be and an image that is not here, StageError (infrastructure) when
        the engine refuses.
        """
        check_spec(spec)
        sandbox = await self._start(spec, attempt_id)
        try:
            if spec.endpoint is not None:
                await sandbox.forward(spec.endpoint)
            for target, source in spec.files.items():
                await sandbox.write_tree(Path(source), target)
            yield sandbox
        finally:
            await sandbox.close()

    async def list(self, run_id: str) -> Sequence[SandboxRef]:
        """Every sandbox of the run that is written down, whoever made it."""
        return [ref.public() for ref in load_containers(self._state) if ref.run_id == run_id]

    async def reap(self, run_id: str) -> int:
        """Destroy every sandbox of the run, by record and by the engine's own labels; how many there were."""
        refs = {ref.name: ref for ref in load_containers(self._state) if ref.run_id == run_id}
        if not refs and self._engine is None and not self._state.is_dir():
            return 0  # nothing was ever made from here: do not ask for an engine
        engine = self._engine or find_engine(self._options.container)
        code, out, err = await engine.call(
            "ps", "--all", "--filter", f"label={LABEL}={run_id}", "--format", "{{.Names}}"
        )
        if code != 0:
            raise StoreError(f"`{engine.program} ps` failed, so that leftover sandboxes cannot be found: {err[-500:]}")
        names = {*refs, *names_of(out)}
        for name in names:
            await engine.remove(name)
        for ref in refs.values():
            ref.forget(self._state)
        return len(names)

    async def _prepared(self, image: str) -> tuple[Engine, Runtime, dict[str, JsonValue]]:
        async with self._starting:
            if self._engine is None or self._runtime is None:
                engine = find_engine(self._options.container)
                runtime = await asyncio.to_thread(build_runtime, cache_directory())
                self._images[image] = await engine.image(image)
                await engine.prove(image, runtime)
                self._hierarchy = None if self._options.cgroups == "off" else cgroups.detect()
                if self._hierarchy is None and self._options.cgroups == "require":
                    raise InputError('sandbox.cgroups = "require", but no cgroup is writable here: use "auto"')
                self._engine, self._runtime = engine, runtime
            if image not in self._images:
                self._images[image] = await self._engine.image(image)
            return self._engine, self._runtime, self._images[image]

    async def _start(self, spec: SandboxSpec, attempt_id: str) -> LiveSandbox:
        reference = spec.image or self._options.container.image or base_reference()
        engine, runtime, image = await self._prepared(reference)
        if spec.image:  # the base image's variables are nobody's; a task's own are part of its environment
            spec = msgspec.structs.replace(spec, env={**image_variables(image), **spec.env})
        token = secrets.token_hex(6)
        group = cgroups.Group(self._hierarchy, f"openforgerl-{token}") if self._hierarchy else None
        ref = ContainerRef(
            run_id=spec.run_id,
            attempt_id=attempt_id,
            token=token,
            engine=engine.program,
            name=f"openforgerl-{token}",
            cgroups=[str(path) for path in group.directories] if group else [],
        )
        ref.save(self._state)  # before anything exists, so that nothing can exist unrecorded
        channel: Channel | None = None
        listener: socket.socket | None = None
        try:
            folder = ref.folder(self._state)
            with serve_directory(folder, spec) as door:
                words = run_words(engine, spec, ref, runtime, str(image["id"]), folder, self._guards)
                code, _, err = await engine.run(*words, timeout=self._options.start_timeout + 30)
                if code != 0:
                    raise failed("start", f"{engine.program} could not start a container of {reference}: {err[-800:]}")
                control, listener, pid = await meet(door, engine, ref, self._options.start_timeout)
            ref.init_pid = pid
            ref.save(self._state)
            channel = await Channel.over(control)
            if group is not None:
                group.make(spec.limits, memory=self._guards.memory_limit, processes=self._guards.process_limit)
            vessel = ContainerVessel(ref, engine, self._state, pid, group, self._options.kill_timeout)
            sandbox = LiveSandbox(spec, vessel, channel, self._options, self._guards, listener=listener)
            watched = self._guards.memory_limit and not vessel.memory_bounded
            code_filter = b""
            if self._guards.seccomp and seccomp.supported():
                code_filter = seccomp.program(forbid_memory_files=watched)
            counted = bool(group and group.processes) or vessel.engine_limits.processes is not None
            settings = init_settings(spec, self._guards, watched=watched, counted=counted, call_filter=code_filter)
            answer = await sandbox.begin(settings)
            vessel.namespaces = dict(answer["namespaces"])
            sandbox.describe(
                described(answer, spec.limits, vessel, watched, self._guards, filtered=bool(code_filter))
                | {"image": image, "runtime": runtime.digest, "layers": layers_of(spec)}
            )
        except BaseException:
            if channel is not None:
                await channel.close()
            if listener is not None:
                listener.close()
            await asyncio.shield(discard(engine, ref, self._state))
            raise
        return sandbox


def image_variables(image: dict[str, JsonValue]) -> dict[str, str]:
    """The ENV of an image."""
    lines = msgspec.convert(image["variables"], list[str])
    return dict(line.split("=", 1) for line in lines if "=" in line)


def layers_of(spec: SandboxSpec) -> list[JsonValue]:
    """Target and digest of each layer, for the record."""
    return [{"target": layer.target, "digest": layer.digest} for layer in spec.layers]


async def discard(engine: Engine, ref: ContainerRef, state: Path) -> None:
    """Remove the container, whatever state it is in, and its record."""
    await engine.remove(ref.name)
    ref.forget(state)
