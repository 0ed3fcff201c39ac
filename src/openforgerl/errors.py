"""Every error this project raises, drawn first.

::

    OpenForgeError
    ├── InputError                 the caller gave something we cannot take; the message names field and fix
    │   ├── ConfigError            a config file, option or command line
    │   ├── TaskError              a task directory that cannot be read
    │   └── TemplateError          a chat template that cannot render this conversation
    ├── ExactnessError             an exactness promise would be broken; never caught to go on
    ├── StoreError                 the run database refused or is damaged
    │   └── AlreadyCommitted       a second outcome for one attempt: the first stands
    ├── WireError                  an HTTP answer in the caller's own dialect (status, code, field)
    │   └── ContextOverflow        prompt and answer do not fit the context
    ├── EngineError                the inference engine failed (infrastructure)
    │   └── EngineOverloaded       try again later; carries retry_after in seconds
    ├── TrainingError              an optimizer step or checkpoint that must not be used (not finite, damaged)
    ├── StageError                 what `boundary()` raises: stage, kind, origin, retryable
    └── Interrupted                a person or signal asked us to stop; work is saved

Two axes matter to whoever decides what happens next: **where** it broke (`Stage`) and **what to do**
(`retryable`). `boundary(stage)` is the only place that classifies: whatever leaves a `with boundary(...)`
block is a `StageError` with its cause chained. Foreign libraries' errors are mapped at the one door of
that library (the aiohttp client's in the harness, Kubernetes' in `sandboxes/kubernetes*`, ...).
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from openforgerl.types.outcomes import Failure, Origin, Stage


class OpenForgeError(Exception):
    """Root of the tree."""


class InputError(OpenForgeError):
    """The caller's input cannot be taken. The message names the field and what is accepted."""


class ConfigError(InputError):
    """A config file, `-s section.key=value` option or command line is wrong."""


class TaskError(InputError):
    """A task directory cannot be read, or lies about itself."""


class TemplateError(InputError):
    """A chat template cannot render this conversation (bad role order, missing tool name, ...)."""


class ExactnessError(OpenForgeError):
    """Going on would train on something the engine did not see or emit. Always a bug or damage."""


class StoreError(OpenForgeError):
    """The run database refused a write, is of another schema version, or is damaged."""


class AlreadyCommitted(StoreError):
    """An attempt's outcome is already committed; the first one stands."""


class WireError(OpenForgeError):
    """An answer other than 200, said in the caller's dialect by `wire/`.

    `status` HTTP status; `code` our stable machine-readable word (`session_closed`, `invalid_request`,
    `context_length_exceeded`, ...); `param` the offending field's path or None; `retry_after` seconds.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ContextOverflow(WireError):
    """Prompt plus at least one token does not fit. `prompt_tokens` and `limit` in tokens."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class EngineError(OpenForgeError):
    """The inference engine broke. Infrastructure: never the policy's fault. `status` is what the client sees, and
    `retry_after`, in seconds, where it helps to come back later."""

    def __init__(self, message: str, *, status: int = 500, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class EngineOverloaded(EngineError):
    """The engine is full; `retry_after` in seconds is passed on to the harness."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, status=429, retry_after=retry_after)


class Interrupted(OpenForgeError):
    """Stopped on request (Ctrl-C, SIGTERM). What was finished is stored; the message says how to resume."""


class TrainingError(OpenForgeError):
    """Training cannot go on: a loss or gradient is not finite, or a checkpoint is damaged. Nothing was changed."""


class StageError(OpenForgeError):
    """A classified failure of one stage of an attempt.

    `kind` is a short stable word (`timeout`, `crash`, `unreachable`, ...). `origin` says whose failure it is
    (DESIGN §5 Outcomes); `retryable` whether another attempt may succeed.
    """

    def __init__(
        self,
        stage: Stage,
        kind: str,
        message: str,
        *,
        origin: Origin,
        retryable: bool,
        evidence: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.kind = kind
        self.message = message
        self.origin = origin
        self.retryable = retryable
        self.evidence = evidence or {}

    def failure(self) -> Failure:
        """This error as the data that the attempt's outcome stores."""
        return Failure(
            stage=self.stage,
            kind=self.kind,
            origin=self.origin,
            message=self.message[:2000],
            retryable=self.retryable,
            evidence={name: str(value)[:2000] for name, value in self.evidence.items()},
        )


_DEFAULT_ORIGIN: dict[Stage, Origin] = {
    Stage.SESSION: Origin.INFRASTRUCTURE,
    Stage.SANDBOX: Origin.INFRASTRUCTURE,
    Stage.SETUP: Origin.HARNESS,
    Stage.RUN: Origin.HARNESS,
    Stage.SEAL: Origin.INFRASTRUCTURE,
    Stage.KILL: Origin.INFRASTRUCTURE,
    Stage.VERIFY: Origin.VERIFIER,
    Stage.COMMIT: Origin.INFRASTRUCTURE,
}


@contextmanager
def boundary(stage: Stage) -> Generator[None]:
    """Classify whatever leaves this block as a `StageError` of `stage`.

    A `StageError` raised inside passes unchanged (it knows better). Cancellation and interruption are not
    failures of the attempt and pass too; so does `ExactnessError`, which must stop the run.
    """
    try:
        yield
    except (StageError, Interrupted, ExactnessError, AlreadyCommitted, asyncio.CancelledError):
        raise
    except (EngineError, OSError, TimeoutError) as error:
        raise StageError(
            stage,
            _kind(error),
            f"{type(error).__name__}: {error}",
            origin=Origin.VERIFIER if stage is Stage.VERIFY else Origin.INFRASTRUCTURE,
            retryable=True,
        ) from error
    except Exception as error:
        raise StageError(
            stage,
            _kind(error),
            f"{type(error).__name__}: {error}",
            origin=_DEFAULT_ORIGIN[stage],
            retryable=not isinstance(error, InputError),
        ) from error


def _kind(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, EngineError):
        return "engine"
    if isinstance(error, InputError):
        return "input"
    if isinstance(error, OSError):
        return "io"
    return "crash"
