"""The process backend: bubblewrap, our init as PID 1, limits by cgroup or by rlimit and watchdog.

What holds and why is in `docs/decisions/0003-process-sandbox.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.sandboxes import cgroups
from openforgerl.sandboxes.bubblewrap import check_spec, find_bwrap, system_python
from openforgerl.sandboxes.guards import Guards
from openforgerl.sandboxes.launch import Launched, Program, compile_init, launch
from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.refs import ProcessRef, boot_id, load_all, reap, start_time, sweep
from openforgerl.sandboxes.sandbox import ProcessSandbox
from openforgerl.types import SandboxRef, SandboxSpec


class ProcessSandboxes:
    """`protocols.Sandboxes` on this machine. `state_dir` holds one small file for each living sandbox.

    `guards` is for tests only (see `guards.py`). Sandboxes die with the thread that runs the event loop.
    """

    def __init__(self, options: SandboxOptions, state_dir: Path, *, guards: Guards | None = None) -> None:
        self._options = options
        self._state = state_dir
        self._guards = guards or Guards()
        self._program: Program | None = None
        self._hierarchy: cgroups.Hierarchy | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def create(self, spec: SandboxSpec, attempt_id: str) -> AsyncGenerator[ProcessSandbox]:
        """A running sandbox with `spec.files` in place; closed at the end, whatever happens.

        Raises InputError for a spec that cannot be, StageError (infrastructure) when the machine refuses.
        """
        check_spec(spec)
        program = await self._prepared()
        sandbox = await self._start(program, spec, attempt_id)
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
        return [ref.public() for ref in load_all(self._state) if ref.run_id == run_id]

    async def reap(self, run_id: str) -> int:
        """Destroy every sandbox of the run; how many there were. Raises StoreError when one will not die."""
        found = [ref for ref in load_all(self._state) if ref.run_id == run_id]
        for ref in found:
            await asyncio.to_thread(reap, ref, self._state, seconds=self._options.kill_timeout, settle=0.2)
        sweep(self._state)
        return len(found)

    async def _prepared(self) -> Program:
        async with self._starting:
            if self._program is None:
                bwrap, python = find_bwrap(self._options.bwrap), system_python()
                self._state.mkdir(parents=True, exist_ok=True)
                self._hierarchy = None if self._options.cgroups == "off" else cgroups.detect()
                if self._hierarchy is None and self._options.cgroups == "require":
                    raise InputError('sandbox.cgroups = "require", but no cgroup is writable here: use "auto"')
                init = await asyncio.to_thread(compile_init, python)
                self._program = Program(bwrap=bwrap, python=python, init=init)
            return self._program

    async def _start(self, program: Program, spec: SandboxSpec, attempt_id: str) -> ProcessSandbox:
        guards, token = self._guards, secrets.token_hex(6)
        group = cgroups.Group(self._hierarchy, f"openforgerl-{token}") if self._hierarchy else None
        ref = ProcessRef(
            run_id=spec.run_id,
            attempt_id=attempt_id,
            token=token,
            boot_id=boot_id(),
            cgroups=[str(path) for path in group.directories] if group else [],
        )
        ref.save(self._state)  # before anything exists, so that nothing can exist unrecorded
        launched: Launched | None = None
        try:
            watched = guards.memory_limit and (group is None or group.memory is None)
            launched = await launch(
                program, spec, guards, token=token, forbid_memory_files=watched, timeout=self._options.start_timeout
            )
            pids = (launched.process.pid, launched.init_pid)
            ref.processes.update({str(pid): started for pid in pids if (started := start_time(pid)) is not None})
            ref.save(self._state)
            if group is not None:
                group.make(spec.limits, memory=guards.memory_limit, processes=guards.process_limit)
            sandbox = ProcessSandbox(spec, ref, launched, group, self._options, guards, self._state)
            await sandbox.begin(watched)
        except BaseException:
            if launched is not None:
                launched.control.close()
                launched.listener.close()
                with contextlib.suppress(ProcessLookupError):
                    launched.process.kill()
                await launched.process.wait()
            reap(ref, self._state, seconds=self._options.kill_timeout)
            raise
        return sandbox
