"""What the API server says when it says no: `Status` bodies, and the one answer that has none."""

from __future__ import annotations

from typing import Any

from openforgerl.errors import OpenForgeError


class Refusal(OpenForgeError):
    """An answer other than 2xx. `text`: the body is this plain text and not a `Status` (throttling)."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after: int | None = None,
        text: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.retry_after = retry_after
        self.text = text

    def body(self) -> dict[str, Any]:
        """The `Status` object."""
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None or self.retry_after is not None:
            status["details"] = dict(self.details or {})
            if self.retry_after is not None:
                status["details"]["retryAfterSeconds"] = self.retry_after
        return {**status, "code": self.code}


def success(**details: Any) -> dict[str, Any]:
    """The `Status` that answers a delete."""
    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**status, "details": details} if details else status


def _named(name: str, plural: str, group: str) -> dict[str, Any]:
    return {"name": name, "kind": plural} | ({"group": group} if group else {})


def full(plural: str, group: str) -> str:
    """`pods`, `leases.coordination.k8s.io`: how messages name a resource."""
    return f"{plural}.{group}" if group else plural


def not_found(plural: str, group: str, name: str) -> Refusal:
    """404."""
    message = f'{full(plural, group)} "{name}" not found'
    return Refusal(404, "NotFound", message, details=_named(name, plural, group))


def no_such_path() -> Refusal:
    """404 for a path that no resource has."""
    return Refusal(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(plural: str, group: str, name: str) -> Refusal:
    """409 for a second create."""
    message = f'{full(plural, group)} "{name}" already exists'
    return Refusal(409, "AlreadyExists", message, details=_named(name, plural, group))


def conflict(plural: str, group: str, name: str, why: str = "") -> Refusal:
    """409 for an update of something that has moved on, or a precondition that does not hold."""
    why = why or ("the object has been modified; please apply your changes to the latest version and try again")
    message = f'Operation cannot be fulfilled on {full(plural, group)} "{name}": {why}'
    return Refusal(409, "Conflict", message, details=_named(name, plural, group))


def forbidden(plural: str, group: str, name: str, why: str) -> Refusal:
    """403: RBAC, quota, admission."""
    subject = f'{full(plural, group)} "{name}" is' if name else f"{full(plural, group)} is"
    return Refusal(403, "Forbidden", f"{subject} forbidden: {why}", details=_named(name, plural, group))


def invalid(kind: str, group: str, name: str, causes: dict[str, str]) -> Refusal:
    """422. `causes`: field → what is wrong with it."""
    listed = [{"reason": "FieldValueInvalid", "message": why, "field": field} for field, why in causes.items()]
    whole = ", ".join(f"{field}: {why}" for field, why in causes.items())
    message = f'{full(kind, group)} "{name}" is invalid: {whole}'
    return Refusal(422, "Invalid", message, details={**_named(name, kind, group), "causes": listed})


def bad_request(message: str) -> Refusal:
    """400."""
    return Refusal(400, "BadRequest", message)


def unauthorized() -> Refusal:
    """401."""
    return Refusal(401, "Unauthorized", "Unauthorized")


def gone(asked: int, floor: int) -> Refusal:
    """410: a resourceVersion that has been compacted away."""
    return Refusal(410, "Expired", f"too old resource version: {asked} ({floor})")


def version_too_large(asked: int, current: int) -> Refusal:
    """504: a resourceVersion that this server has not seen yet."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    return Refusal(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        details={"causes": [cause]},
        retry_after=1,
    )


def throttled(retry_after: int = 1) -> Refusal:
    """429 as the max-in-flight filter answers it: plain text, no `Status`."""
    text = "Too many requests, please try again later.\n"
    return Refusal(429, "TooManyRequests", text.strip(), retry_after=retry_after, text=text)


def method_not_allowed() -> Refusal:
    """405."""
    message = "the server does not allow this method on the requested resource"
    return Refusal(405, "MethodNotAllowed", message, details={})
