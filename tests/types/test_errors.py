"""`boundary` is the only classifier."""

from __future__ import annotations

import asyncio

import pytest

from openforgerl.errors import (
    AlreadyCommitted,
    EngineError,
    ExactnessError,
    Interrupted,
    StageError,
    TaskError,
    boundary,
)
from openforgerl.types import Origin, Stage


@pytest.mark.parametrize(
    ("stage", "error", "kind", "origin", "retryable"),
    [
        (Stage.RUN, RuntimeError("x"), "crash", Origin.HARNESS, True),
        (Stage.RUN, OSError("disk"), "io", Origin.INFRASTRUCTURE, True),
        (Stage.SANDBOX, RuntimeError("x"), "crash", Origin.INFRASTRUCTURE, True),
        (Stage.VERIFY, RuntimeError("x"), "crash", Origin.VERIFIER, True),
        (Stage.VERIFY, OSError("x"), "io", Origin.VERIFIER, True),
        (Stage.SETUP, TaskError("bad"), "input", Origin.HARNESS, False),
        (Stage.SESSION, TimeoutError(), "timeout", Origin.INFRASTRUCTURE, True),
        (Stage.RUN, EngineError("gone"), "engine", Origin.INFRASTRUCTURE, True),
    ],
)
def test_what_leaves_is_classified(stage: Stage, error: Exception, kind: str, origin: Origin, retryable: bool) -> None:
    with pytest.raises(StageError) as raised, boundary(stage):
        raise error
    failure = raised.value.failure()
    assert (failure.stage, failure.kind, failure.origin, failure.retryable) == (stage, kind, origin, retryable)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        StageError(Stage.RUN, "oom", "m", origin=Origin.INFRASTRUCTURE, retryable=True),
        ExactnessError("x"),
        AlreadyCommitted("x"),
        Interrupted("x"),
        asyncio.CancelledError(),
    ],
)
def test_what_knows_better_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, boundary(Stage.VERIFY):
        raise error
    assert raised.value is error
