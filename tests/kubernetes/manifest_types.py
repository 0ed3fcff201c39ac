"""Are manifests what the API server would take? Unknown fields, wrong types and missing ones, without a server.

Kubernetes' own kinds are read from `lightkube-models` (types generated from Kubernetes' OpenAPI document), KubeRay's
from `schemas/kuberay.json` (scripts/read_kuberay.py).
"""

from __future__ import annotations

import importlib
import json
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

Object = dict[str, Any]
_MODULES = {
    "v1": "core_v1",
    "apps/v1": "apps_v1",
    "batch/v1": "batch_v1",
    "networking.k8s.io/v1": "networking_v1",
    "rbac.authorization.k8s.io/v1": "rbac_v1",
}
_QUANTITY = re.compile(r"[+-]?[0-9.]+([eE][+-]?[0-9]+|[KMGTPE]i|[mkMGTPE])?")
_JSON = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def faults(document: Object) -> list[str]:
    """`path: what is wrong` for everything in a manifest that its kind does not have."""
    version, kind = document.get("apiVersion", ""), document.get("kind", "")
    rest = {key: value for key, value in document.items() if key not in ("apiVersion", "kind", "metadata", "spec")}
    if version == "ray.io/v1":
        found = [f"{key}: unknown field" for key in rest]
        found += _typed(document.get("metadata"), _model("meta_v1", "ObjectMeta"), "metadata")
        return found + list(_by_schema(document["spec"], _kuberay()[kind], "spec"))
    return list(_typed(document, _model(_MODULES[version], kind), kind))


def _model(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lightkube.models.{module}"), name)


@cache
def _kuberay() -> Object:
    return json.loads((Path(__file__).parent / "schemas" / "kuberay.json").read_text())


def _typed(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Against a type of lightkube's models: a class of fields, a list, a dict, or something plain."""
    options = [one for one in _options(kind) if one is not types.NoneType]
    if len(options) > 1:
        if not isinstance(value, tuple(options)):
            yield f"{path}: {value!r} is none of {options}"
        return
    (kind,) = options
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            yield f"{path}: a list is wanted, not {value!r}"
            return
        for number, item in enumerate(value):
            yield from _typed(item, typing.get_args(kind)[0], f"{path}[{number}]")
    elif kind is dict or typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            yield f"{path}: an object is wanted, not {value!r}"
        elif path.rpartition(".")[2] in ("requests", "limits", "hard"):
            yield from (
                f"{path}.{name}: {amount!r} is no quantity"
                for name, amount in value.items()
                if not (isinstance(amount, str) and _QUANTITY.fullmatch(amount))
            )
        else:
            yield from (f"{path}.{name}: text is wanted" for name, one in value.items() if not isinstance(one, str))
    elif hasattr(kind, "from_dict"):
        yield from _fields(value, kind, path)
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{path}: {getattr(kind, '__name__', kind)} is wanted, not {value!r}"


def _fields(value: Any, kind: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: {kind.__name__} is wanted, not {value!r}"
        return
    fields = {name.rstrip("_"): hint for name, hint in typing.get_type_hints(kind).items()}
    for name, hint in fields.items():
        if name not in value and types.NoneType not in _options(hint):
            yield f"{path}.{name}: is missing"
    for name, item in value.items():
        if name not in fields:
            yield f"{path}.{name}: unknown field"
        else:
            yield from _typed(item, fields[name], f"{path}.{name}")


def _options(kind: Any) -> tuple[Any, ...]:
    united = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if united else (kind,)


def _by_schema(value: Any, schema: Object, path: str) -> Iterator[str]:
    """Against a custom resource's schema; what it leaves to Kubernetes' own types is read there."""
    if kind := schema.get("x-kind"):
        yield from _typed(value, _model("core_v1", kind), path)
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: a number or text is wanted, not {value!r}"
        return
    wanted = _JSON[schema["type"]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{path}: {schema['type']} is wanted, not {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not among {schema['enum']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: {value} is below {schema['minimum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _by_schema(item, schema["items"], f"{path}[{number}]")
    if isinstance(value, dict):
        yield from (f"{path}.{name}: is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if inner:
                yield from _by_schema(item, inner, f"{path}.{name}")
            else:
                yield f"{path}.{name}: unknown field"
