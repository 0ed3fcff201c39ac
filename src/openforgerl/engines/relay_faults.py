"""What can go wrong at somebody else's API, and what follows: try again, or which error of ours to raise."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping

import msgspec

from openforgerl.errors import ContextOverflow, EngineError, EngineOverloaded, OpenForgeError
from openforgerl.types import JsonValue

MOST_SHOWN = 500
"""Characters of an upstream's own words that are passed on."""

_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_OVERLOADED = frozenset({429, 529})
_NO_CREDIT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_error"})
"""Codes of a 429 or 400 that no waiting helps against."""
_WORDS = {
    "overloaded_error": 529,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "requests": 429,
    "tokens": 429,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "timeout_error": 504,
}
"""Error types and codes as they stand in streams (OpenAI and Anthropic API references, "Errors") → HTTP status."""
_OVERFLOW_CODES = frozenset({"context_length_exceeded", "string_above_max_length", "exceed_context_size_error"})
_OVERFLOW_SAYINGS = (
    re.compile(r"maximum context length is (?P<limit>\d+) tokens\D*?(?P<used>\d+)"),
    re.compile(r"prompt is too long: (?P<used>\d+) tokens > (?P<limit>\d+)"),
    re.compile(r"input length and `max_tokens` exceed context limit: (?P<used>\d+) \+ \d+ > (?P<limit>\d+)"),
    re.compile(r"prompt is too long|maximum context length|exceeds? the context window|context size has been exceeded"),
)
"""How upstreams that give no code say that a prompt is too long (OpenAI, vLLM, Anthropic, llama.cpp)."""


class Fault(Exception):
    """One attempt failed. `again`: another one may not; else, or when there is no time left, `error` is raised."""

    def __init__(self, error: OpenForgeError, *, again: bool, wait: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again
        self.wait = wait
        """Seconds that the upstream asked us to wait, or None."""

    @property
    def overloaded(self) -> bool:
        """Whether the upstream has too much to do: then our other requests had better wait as well."""
        return isinstance(self.error, EngineOverloaded)


class OutOfTime(Exception):
    """The time given for an answer is over."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an error answer that APIs agree on."""

    message: str = ""
    type: str = ""
    code: str = ""
    status: int | None = None
    """When the body itself names one."""

    @classmethod
    def read(cls, value: JsonValue) -> Said:
        """From a parsed body: `{"error": {"message", "type", "code"}}`, `{"error": "..."}`, `{"message": ...}`."""
        if isinstance(value, list) and value:
            value = value[0]
        inner = value.get("error", value) if isinstance(value, dict) else value
        if not isinstance(inner, dict):
            return cls(message=inner if isinstance(inner, str) else "")
        code = inner.get("code")
        return cls(
            message=str(inner.get("message") or inner.get("detail") or ""),
            type=str(inner.get("type") or ""),
            code=code if isinstance(code, str) else "",
            status=code if isinstance(code, int) and 400 <= code <= 599 else None,
        )


def refusal(status: int, body: bytes, headers: Mapping[str, str], prompt_tokens: int, limit: int) -> Fault:
    """The fault that an answer other than 200 is. `prompt_tokens` and `limit` are our own, for an overflow."""
    try:
        said = Said.read(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError):
        said = Said()
    return _fault(status, said, retry_after(headers), prompt_tokens, limit)


def in_stream(value: JsonValue, prompt_tokens: int, limit: int) -> Fault:
    """The fault that an error event in a stream is."""
    said = Said.read(value)
    status = said.status or _WORDS.get(said.type) or _WORDS.get(said.code) or 500
    return _fault(status, said, None, prompt_tokens, limit)


def malformed(what: str) -> Fault:
    """An answer that is not what the API promises. It may be a broken intermediary, so it is worth another try."""
    return Fault(EngineError(f"the upstream's answer cannot be read: {what}", status=503), again=True)


def cut(what: str) -> Fault:
    """No connection, or one that ended before the answer did."""
    return Fault(EngineError(f"the upstream cannot be reached: {what}", status=503), again=True)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as `Retry-After-Ms` or `Retry-After` (seconds, or an HTTP date) say; None when they do not."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d+)?", text):
            return float(text) * unit
    try:
        at = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, at.timestamp() - time.time())


def _fault(status: int, said: Said, wait: float | None, prompt_tokens: int, limit: int) -> Fault:
    words = f": {said.message[:MOST_SHOWN]}" if said.message else ""
    if _NO_CREDIT & {said.code, said.type} or status == 402:
        return Fault(EngineError(f"the upstream account has no credit left (HTTP {status})"), again=False)
    if status in (401, 403):
        # The upstream's words may quote the key, and the agent has no business with it: they are not passed on.
        return Fault(
            EngineError(
                f"the upstream refused the proxy's credentials (HTTP {status}): "
                "check engine.relay.key_env or engine.relay.key_file"
            ),
            again=False,
        )
    if status in (400, 413, 422):
        overflow = _overflow(said, prompt_tokens, limit)
        if overflow is not None:
            return Fault(overflow, again=False)
        return Fault(
            EngineError(f"the upstream refused the request (HTTP {status}){words}", status=status), again=False
        )
    if status == 404:
        return Fault(
            EngineError(f"the upstream knows no such path or model: check engine.path and engine.relay.model{words}"),
            again=False,
        )
    if status in _OVERLOADED:
        return Fault(
            EngineOverloaded(f"the upstream is overloaded (HTTP {status}){words}", retry_after=wait or 1.0),
            again=True,
            wait=wait,
        )
    if 300 <= status < 400:
        return Fault(
            EngineError(f"the upstream answers with a redirect (HTTP {status}): give the final URL as engine.path"),
            again=False,
        )
    again = status in _TRY_AGAIN
    return Fault(
        EngineError(f"the upstream failed (HTTP {status}){words}", status=503 if again else 500),
        again=again,
        wait=wait,
    )


def _overflow(said: Said, prompt_tokens: int, limit: int) -> ContextOverflow | None:
    """The overflow in the upstream's numbers; in ours, at least one token over, where it gives none."""
    for saying in _OVERFLOW_SAYINGS:
        found = saying.search(said.message)
        if found is not None:
            numbers = found.groupdict()
            if numbers:
                return ContextOverflow(int(numbers["used"]), int(numbers["limit"]))
            break
    else:
        if said.code not in _OVERFLOW_CODES:
            return None
    return ContextOverflow(max(prompt_tokens, limit + 1), limit)
