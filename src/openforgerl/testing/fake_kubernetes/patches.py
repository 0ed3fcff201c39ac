"""The kinds of patch, as far as they are used: merge (RFC 7386), JSON (RFC 6902), strategic merge.

Server-side apply is taken for a strategic merge: nobody owns fields here.
"""

from __future__ import annotations

from typing import Any

from openforgerl.testing.fake_kubernetes import statuses
from openforgerl.testing.fake_kubernetes.kinds import Object
from openforgerl.testing.fake_kubernetes.objects import copy

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ownerReferences": "uid",
    "conditions": "type",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists that a strategic patch merges by this key of their items; finalizers are a set; others are replaced."""


def apply(body: Object, patch: Any, content_type: str) -> Object:
    """A patched copy of `body`. Raises Refusal (400, 415, 422)."""
    if content_type == JSON:
        return _json(copy(body), patch)
    if content_type not in (MERGE, STRATEGIC, APPLY):
        raise statuses.Refusal(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format - {content_type}"
        )
    if not isinstance(patch, dict):
        raise statuses.bad_request("the patch must be a JSON object")
    return _merge(copy(body), patch, strategic=content_type != MERGE)


def _merge(target: Any, patch: Any, *, strategic: bool, name: str = "") -> Any:
    if isinstance(patch, list) and strategic and isinstance(target, list):
        if name == "finalizers":
            return [*target, *(item for item in patch if item not in target)]
        if name in _MERGE_KEYS:
            return _merge_list(target, patch, _MERGE_KEYS[name])
    if not isinstance(patch, dict):
        return patch
    merged: dict[str, Any] = target if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif not key.startswith("$"):
            merged[key] = _merge(merged.get(key), value, strategic=strategic, name=key)
    return merged


def _merge_list(target: list[Any], patch: list[Any], key: str) -> list[Any]:
    merged = list(target)
    for item in patch:
        at = next((index for index, old in enumerate(merged) if old.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del merged[at]
        elif at is None:
            merged.append(item)
        else:
            merged[at] = _merge(merged[at], item, strategic=True)
    return merged


def _json(body: Object, patch: Any) -> Object:
    if not isinstance(patch, list):
        raise statuses.bad_request("a JSON patch must be a list of operations")
    for operation in patch:
        try:
            _operate(body, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = f"the server rejected our request due to an error in our request: {operation} ({error!r})"
            raise statuses.Refusal(422, "Invalid", message) from error
    return body


def _operate(body: Object, operation: dict[str, Any]) -> None:
    parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    parent: Any = body
    for part in parts[:-1]:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    last: Any = parts[-1]
    if isinstance(parent, list):
        last = len(parent) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(last, operation["value"])
        case "add":
            parent[last] = operation["value"]
        case "replace":
            parent[last]  # what is not there cannot be replaced
            parent[last] = operation["value"]
        case "remove":
            del parent[last]
        case "test":
            if parent[last] != operation["value"]:
                raise ValueError("test failed")
        case other:
            raise ValueError(f"operation {other} is not played")
