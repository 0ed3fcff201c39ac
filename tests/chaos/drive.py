"""Runs the demo in this process and kills it with SIGKILL at a named point. Started by the chaos tests only.

usage: drive.py POINT AFTER -- demo arguments        (POINT `none`: run to the end)
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from openforgerl.cli.main import main
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.store import runs
from openforgerl.training import grpo, sft
from openforgerl.verifiers.script import ScriptVerifier


class Fuse:
    """Kills this process when it burns for the `after`-th time."""

    def __init__(self, after: int) -> None:
        self.left = after

    def burn(self) -> None:
        self.left -= 1
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def before(fuse: Fuse, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fuse.burn()
        return function(*args, **kwargs)

    return wrapped


def after(fuse: Fuse, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        fuse.burn()
        return result

    return wrapped


def mid_stream(fuse: Fuse) -> None:
    """Between two tokens of an answer."""
    generate = TorchEngine.generate

    async def wrapped(self: TorchEngine, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for chunk in generate(self, *args, **kwargs):
            fuse.burn()
            yield chunk

    TorchEngine.generate = wrapped  # type: ignore[method-assign]


def mid_commit(fuse: Fuse) -> None:
    """Inside the transaction that finishes an attempt: everything written, nothing committed."""
    runs._commit = after(fuse, runs._commit)


def mid_verification(fuse: Fuse) -> None:
    """While the verifier's sandbox is alive."""
    verify = ScriptVerifier.verify

    async def wrapped(self: ScriptVerifier, *args: Any, **kwargs: Any) -> Any:
        work: Awaitable[Any] = verify(self, *args, **kwargs)
        result = await work
        fuse.burn()
        return result

    ScriptVerifier.verify = wrapped  # type: ignore[method-assign]


def after_checkpoint(fuse: Fuse) -> None:
    """The optimizer step is made and saved, but not recorded."""
    grpo.save_checkpoint = after(fuse, grpo.save_checkpoint)


def before_publish(fuse: Fuse) -> None:
    """The step is recorded, the engine still has the old weights."""
    publish = grpo.GrpoLoop._publish

    async def wrapped(self: grpo.GrpoLoop, checkpoint: Any, version: int) -> None:
        if version > 0:
            fuse.burn()
        await publish(self, checkpoint, version)

    grpo.GrpoLoop._publish = wrapped  # type: ignore[method-assign]


def mid_sft(fuse: Fuse) -> None:
    """After an SFT step's checkpoint."""
    sft.prune = before(fuse, sft.prune)


POINTS = {
    point.__name__: point
    for point in (mid_stream, mid_commit, mid_verification, after_checkpoint, before_publish, mid_sft)
}

if __name__ == "__main__":
    name, count = sys.argv[1], int(sys.argv[2])
    if name != "none":
        POINTS[name](Fuse(count))
    main(["demo", *sys.argv[4:]])
