"""Containers that are coroutines of this process: thousands of pods on two cores."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence

from openforgerl.testing.fake_kubernetes.containers import Ended, ExecProcess, Launch, ProgramContext, StartRefused


class CoroutineContainer:
    """A program's task. SIGTERM cancels it unless its image handles that; SIGKILL always does."""

    def __init__(self, launch: Launch) -> None:
        assert launch.image.program is not None
        self._launch = launch
        self._context = ProgramContext(launch)
        self._signal = 0
        self._task = asyncio.create_task(self._run())

    @property
    def pid(self) -> int:
        """None of its own."""
        return 0

    async def _run(self) -> int:
        program = self._launch.image.program
        assert program is not None
        return await program(self._context) or 0

    async def wait(self) -> Ended:
        """Until it returns."""
        await asyncio.wait([self._task])
        code = 128 + self._signal
        if not self._task.cancelled():
            error = self._task.exception()
            code = self._task.result() if error is None else 1
            if error is not None:
                self._launch.log.write("".join(traceback.format_exception(error)).encode())
        self._launch.log.end()
        return Ended(code)

    def terminate(self) -> None:
        """SIGTERM."""
        if self._launch.image.handles_term:
            self._context.terminating.set()
        else:
            self._cancel(15)

    def kill(self) -> None:
        """SIGKILL."""
        self._cancel(9)

    def _cancel(self, number: int) -> None:
        if not self._task.done():
            self._signal = number
            self._task.cancel()

    def kill_child(self) -> None:
        """It has none."""

    async def exec(self, argv: Sequence[str], *, stdin: bool) -> ExecProcess:
        """There is no machine in it."""
        raise StartRefused(f"container {self._launch.name} is a coroutine: {argv[0]} cannot run in it ({stdin=})")


class CoroutineRuntime:
    """Starts them."""

    async def start(self, launch: Launch) -> CoroutineContainer:
        """Never refuses."""
        return CoroutineContainer(launch)
