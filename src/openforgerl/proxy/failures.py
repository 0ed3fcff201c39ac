"""How a call that does not complete is recorded, and what its client is told."""

from __future__ import annotations

from openforgerl.errors import EngineError, EngineOverloaded, StoreError, TemplateError, WireError
from openforgerl.proxy.sessions import Ended, shutting_down
from openforgerl.types import CallStatus


class ClientLeft(Exception):
    """The client closed its side or stopped reading."""


class Stopped(Exception):
    """The call was stopped from outside; `Exchange.stopped_by` says why."""


def classified(error: Exception, stopped_by: Ended | None) -> tuple[CallStatus, WireError | None, str]:
    """How a failure is recorded, what the client is told (None: nobody is there), and why in words."""
    if isinstance(error, ClientLeft) or stopped_by is Ended.CLIENT_LEFT:
        return CallStatus.ABORTED, None, Ended.CLIENT_LEFT.value
    if stopped_by is not None and isinstance(error, Stopped):
        return CallStatus.ABORTED, _closed(stopped_by), stopped_by.value
    if isinstance(error, WireError):
        return CallStatus.ERROR, error, f"{error.code}: {error.message}"
    if isinstance(error, EngineError):
        told = _engine_failure(error)
        return CallStatus.ERROR, told, f"{told.code}: {told.message}"
    if isinstance(error, TemplateError):
        told = unrenderable(error)
        return CallStatus.ERROR, told, f"{told.code}: {told.message}"
    if isinstance(error, StoreError):
        told = _server_error(500, "store_error", "the call could not be recorded, so it is not answered")
        return CallStatus.ERROR, told, f"{told.code}: {error}"
    told = _server_error(500, "internal_error", "the proxy failed; its log says why")
    return CallStatus.ERROR, told, f"{told.code}: {type(error).__name__}: {error}"


def unrenderable(error: TemplateError) -> WireError:
    """What the client sees of a conversation that the chat template refuses."""
    return WireError(400, "template_error", f"messages: {error}", param="messages")


def _closed(why: Ended) -> WireError:
    if why is Ended.SHUTDOWN:
        return shutting_down()
    reason = "was sealed" if why is Ended.SEALED else "ran out of time"
    return WireError(403, "session_closed", f"this session {reason} while the call was running")


def _engine_failure(error: EngineError) -> WireError:
    """What the client sees of an engine error. A 429 always says when to come back: without, harnesses give up."""
    if isinstance(error, EngineOverloaded):
        return WireError(429, "rate_limit_exceeded", str(error), retry_after=error.retry_after)
    if error.status == 429:
        return WireError(429, "rate_limit_exceeded", str(error), retry_after=1)
    return _server_error(error.status, "engine_error", str(error), retry_after=error.retry_after)


def _server_error(status: int, code: str, message: str, *, retry_after: float | None = None) -> WireError:
    """A failure of ours, named as one in the message too.

    Inside a stream that has begun there is no status any more, and harnesses (pi, OpenClaw) go by the words of the
    message: without these, a break in the middle ends them where a refused request would have been tried again.
    """
    told = message if status < 500 else f"server error {status}: {message}"
    return WireError(status, code, told, retry_after=retry_after)
